"""Read and write request records as .npz files, without numpy."""

from __future__ import annotations

import ast
import zipfile
from array import array
from pathlib import Path

from powerband.core.records import COLUMNS, Records
from powerband.errors import InputError

_MAGIC = b"\x93NUMPY\x01\x00"


def write(path: Path, records: Records) -> None:
    """Write each column as one array of the archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, column in records.stored.items():
            header = f"{{'descr': '<{_kind(column)}{column.itemsize}', 'fortran_order': False, "
            header += f"'shape': ({len(column)},), }}"
            padding = -(len(_MAGIC) + 2 + len(header) + 1) % 64
            padded = header.encode() + b" " * padding + b"\n"
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                stream.write(_MAGIC + len(padded).to_bytes(2, "little") + padded)
                stream.write(memoryview(column).cast("B"))


def read(path: Path) -> Records:
    """Read records from a file of `write`."""
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
            f"{path} contains no request records: {error}", hint="give a file that 'powerband bench' wrote"
        ) from None
    return records


def _kind(column: array[int]) -> str:
    return "u" if column.typecode.isupper() else "i"
