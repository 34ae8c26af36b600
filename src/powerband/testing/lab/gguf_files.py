"""The tensors of a GGUF file, and llama.cpp's words for a file that it cannot load."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from powerband.core import gguf
from powerband.core.model import Model, from_gguf

_BLOCKS = {  # by ggml type: elements and bytes of a block
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36),
}  # fmt: skip
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_LOADING = "llama_model_load: error loading model: "


class NotLoaded(Exception):
    """llama.cpp prints these lines for a file that it cannot load."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file."""

    name: str
    size_bytes: int
    offset_bytes: int  # after the start of the data

    @property
    def layer(self) -> int | None:
        """Return the number of its layer; None: it belongs to the input or the output."""
        return int(self.name.split(".")[1]) if self.name.startswith("blk.") else None


@dataclass(frozen=True)
class GgufFile:
    """A model file."""

    model: Model
    header: dict[str, Any]
    tensors: tuple[Tensor, ...]


def read(path: Path) -> GgufFile:
    """Read a file; raises NotLoaded."""

    def unreadable(text: str) -> NotLoaded:
        return NotLoaded(text, f"{_LOADING}llama_model_loader: failed to load model from {path}")

    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                said = "".join(chr(one) if 32 <= one < 127 else "?" for one in magic)
                raise unreadable(f"gguf_init_from_reader: invalid magic characters: '{said}', expected 'GGUF'")
            file.seek(0)
            header = gguf.read_header(file)
            tensors, data_start = _tensors(file, int(header.get("general.alignment", 32)))
    except IsADirectoryError:
        raise unreadable("gguf_init_from_reader: failed to read magic") from None
    except OSError:
        raise unreadable(
            f"gguf_init_from_file: failed to open GGUF file '{path}' (No such file or directory)"
        ) from None
    except (gguf.NotGguf, struct.error, KeyError, UnicodeDecodeError):
        raise unreadable("gguf_init_from_reader: failed to read key-value pairs") from None
    size = path.stat().st_size
    for one in tensors:
        if data_start + one.offset_bytes + one.size_bytes > size:
            outside = f"tensor '{one.name}' data is not within the file bounds, model is corrupted or incomplete"
            raise NotLoaded(_LOADING + outside)
    return GgufFile(from_gguf(header, source=str(path), weight_bytes=size), header, tensors)


def check_model(file: GgufFile, architectures: Sequence[str]) -> None:
    """Raise NotLoaded unless a file is a model of a known architecture."""
    architecture = file.model.architecture
    if architecture not in architectures:
        raise NotLoaded(f"{_LOADING}unknown model architecture: '{architecture}'")
    for key, value in (("context_length", file.model.context_tokens), ("embedding_length", file.model.hidden),
                       ("block_count", file.model.layers)):  # fmt: skip
        if value is None:
            missing = f"key not found in model: {architecture}.{key}"
            raise NotLoaded(f"{_LOADING}error loading model hyperparameters: {missing}")


def _tensors(file: BinaryIO, alignment: int) -> tuple[tuple[Tensor, ...], int]:
    """Return the tensors of a file, and the offset of their data."""
    file.seek(8)
    count, pairs = struct.unpack("<QQ", file.read(16))
    for _ in range(pairs):
        _skip_string(file)
        _skip_value(file, _number(file, "I"))
    found = []
    for _ in range(count):
        name = file.read(_number(file, "Q")).decode()
        elements = 1
        for _ in range(_number(file, "I")):
            elements *= _number(file, "Q")
        per_block, block_bytes = _BLOCKS[_number(file, "I")]
        found.append(Tensor(name, elements // per_block * block_bytes, _number(file, "Q")))
    return tuple(found), -(-file.tell() // alignment) * alignment


def _number(file: BinaryIO, code: str) -> int:
    return int(struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0])


def _skip_string(file: BinaryIO) -> None:
    file.seek(_number(file, "Q"), 1)


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _skip_string(file)
    elif kind == _ARRAY:
        inner, count = _number(file, "I"), _number(file, "Q")
        if inner == _STRING:
            for _ in range(count):
                _skip_string(file)
        else:
            file.seek(count * _SCALAR_BYTES[inner], 1)
    else:
        file.seek(_SCALAR_BYTES[kind], 1)
