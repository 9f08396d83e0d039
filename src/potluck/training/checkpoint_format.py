"""The safetensors layout: a JSON header that says where each tensor lies, then their bytes.

Anything that reads safetensors can read these files.  Nothing in them can run code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import msgspec
import numpy as np

from potluck.arrays.base import Dtype
from potluck.decoding import Exact, decode_json
from potluck.errors import IoError

__all__ = ["MAX_HEADER", "Entry", "decode_header", "dtype_of", "encode_header", "name_of"]

MAX_HEADER = 100 << 20
"""Bytes of a header; the limit that other readers of the format have."""

_ALIGNMENT = 8
_LENGTH = 8

_NAMES: dict[Dtype, str] = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(np.complex64): "C64",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint64): "U64",
    np.dtype(np.uint32): "U32",
    np.dtype(np.uint16): "U16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Bytes from the end of the header."""
    stop: int


def name_of(dtype: Dtype) -> str:
    """What the format calls a type.

    >>> name_of(np.dtype("float32"))
    'F32'
    """
    name = _NAMES.get(dtype.newbyteorder("="))
    if name is None:
        known = ", ".join(str(each) for each in _NAMES)
        msg = f"An array of {dtype} cannot be saved as safetensors; these can: {known}"
        raise TypeError(msg)
    return name


def dtype_of(name: str) -> Dtype:
    """The type that has this name in the format."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise IoError(f"The file has a tensor of the unknown type {name[:40]!r}")
    return dtype


def encode_header(entries: Mapping[str, Entry], facts: Mapping[str, str]) -> bytes:
    """The beginning of a file: the header's length, and the header."""
    header: dict[str, object] = {"__metadata__": dict(facts)} if facts else {}
    for name, entry in entries.items():
        header[name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [entry.start, entry.stop],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH, "little") + text


class _Row(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def decode_header(data: bytes) -> tuple[dict[str, Entry], dict[str, str], int]:
    """The tensors of a file from its beginning, its metadata, and where the bytes begin."""
    length = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH or not 0 < length <= min(MAX_HEADER, len(data) - _LENGTH):
        raise IoError("This is no safetensors file", cause="its header has no possible length")
    try:
        raw = decode_json(data[_LENGTH : _LENGTH + length], dict[Exact, msgspec.Raw])
        facts = decode_json(raw.pop("__metadata__", b"{}"), dict[Exact, Exact])
        rows = {name: decode_json(row, _Row) for name, row in raw.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise IoError("This is no safetensors file", cause=str(error)) from None
    entries = {name: _checked(name, row) for name, row in rows.items()}
    return entries, facts, _LENGTH + length


def _checked(name: str, row: _Row) -> Entry:
    start, stop = row.data_offsets
    size = math.prod(row.shape) * dtype_of(row.dtype).itemsize
    if min([start, *row.shape]) < 0 or stop - start != size:
        raise IoError(f"The tensor {name[:100]!r} has {stop - start} bytes where {size} are due")
    return Entry(row.dtype, tuple(row.shape), start, stop)
