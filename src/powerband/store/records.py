"""Keep request records as .npz: numpy opens them, and so do we, without numpy."""

from __future__ import annotations

import ast
import zipfile
from array import array
from pathlib import Path

from powerband.core.records import COLUMNS, Records
from powerband.errors import InputError

_MAGIC = b"\x93NUMPY\x01\x00"


def write(path: Path, records: Records) -> None:
    """Write every column as one array of the archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, column in records.stored.items():
            described = f"{{'descr': '<{_kind(column)}{column.itemsize}', 'fortran_order': False, "
            described += f"'shape': ({len(column)},), }}"
            padding = -(len(_MAGIC) + 2 + len(described) + 1) % 64
            head = described.encode() + b" " * padding + b"\n"
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                stream.write(_MAGIC + len(head).to_bytes(2, "little") + head)
                stream.write(memoryview(column).cast("B"))


def read(path: Path) -> Records:
    """Read what `write` wrote."""
    records = Records()
    try:
        with zipfile.ZipFile(path) as archive:
            for name in (*COLUMNS, "gaps"):
                data = archive.read(f"{name}.npy")
                length = int.from_bytes(data[8:10], "little")
                count = ast.literal_eval(data[10 : 10 + length].decode())["shape"][0]
                column = array(COLUMNS.get(name, "I"))
                column.frombytes(memoryview(data)[10 + length :])
                if len(column) != count:
                    raise ValueError(name)
                if name == "gaps":
                    records.gaps = column
                else:
                    records.columns[name] = column
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} holds no request records: {error}", hint="it is written by 'powerband bench'"
        ) from None
    return records


def _kind(column: array[int]) -> str:
    return "u" if column.typecode.isupper() else "i"
