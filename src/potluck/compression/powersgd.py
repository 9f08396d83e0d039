"""PowerSGD: a matrix as the product of two thin ones, found by one step of power iteration.

From ``Q`` of the last step (at first, from a seed) comes ``P = M Q``, made orthonormal, and from
that the new ``Q = Mᵀ P``.  What stands for the matrix is ``P Qᵀ``.  Ranks sum ``P`` and ``Q`` on
the way; whatever they then compute from the sums gives the same bits on every machine, because it
is made of single additions and multiplications in a fixed order (see ``dot`` and ``product``).

A tensor becomes a matrix by its first dimension; one that would not become smaller stays as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import prod, sqrt

import numpy as np
import numpy.typing as npt

from potluck.compression.base import (
    CHUNK,
    ByteArray,
    CompressionContext,
    Floats,
    Method,
    take_front,
)
from potluck.errors import MalformedFrame

Doubles = npt.NDArray[np.float64]

_HEAD = struct.Struct("<QQQ")  # rows, columns, rank

VANISHED = 1e-6
"""Of its former length, below which what is left of a column is only rounding."""


class PowerSGD(Method):
    """Two thin matrices; a tensor for which that would not be less stays as it is."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def start(self, turn: CompressionContext) -> tuple[tuple[int, int], Floats] | None:
        """The tensor's shape as a matrix, and the ``Q`` to begin with; None if it stays."""
        shape = matrix_shape(turn.shape, self._rank)
        if shape is None:
            return None
        fresh, warm = first_q(shape[1], self._rank, turn.seed), turn.kept
        if warm is None or warm.shape != fresh.shape or not np.isfinite(warm).all():
            return shape, fresh
        # What was zero once would stay so for ever: a gradient of zeros, or of a lower rank.
        return shape, np.where(warm.any(axis=0), warm, fresh)

    def encode(self, values: Floats, turn: CompressionContext) -> ByteArray:
        """Both matrices, or the values."""
        begun = self.start(turn)
        if begun is None:
            return np.concatenate((np.zeros(_HEAD.size, np.uint8), values.view(np.uint8)))
        shape, q = begun
        matrix = values.reshape(shape)
        p = orthonormal(matrix @ q)
        turn.kept = q = np.ascontiguousarray(matrix.T @ p)
        return pack(p, q)

    def decode(self, data: ByteArray, total: int) -> Floats:
        """Their product."""
        return unpack(data, total)


def matrix_shape(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Rows and columns of a tensor as a matrix; None if two thin ones would not be smaller.

    >>> matrix_shape((64, 3, 3, 3), rank=4), matrix_shape((64,), rank=4)
    ((64, 27), None)
    """
    if not shape:
        return None
    rows, columns = shape[0], prod(shape[1:])
    return (rows, columns) if (rows + columns) * rank < rows * columns else None


def first_q(columns: int, rank: int, seed: int) -> Floats:
    """A ``Q`` to begin with: numbers from −1 to 1, the same on every machine."""
    raw = np.random.PCG64(seed).random_raw(columns * rank) >> np.uint64(40)
    return (raw.astype(np.float32) / np.float32(1 << 23) - np.float32(1)).reshape(columns, rank)


def dot(first: Doubles, second: Doubles) -> float:
    """A scalar product by halves: only additions of arrays, so the same bits everywhere."""
    terms = first * second
    while terms.size > 1:
        half = terms.size // 2
        pairs = terms[:half] + terms[half : 2 * half]
        terms = np.append(pairs, terms[-1]) if terms.size % 2 else pairs
    return float(terms[0]) if terms.size else 0.0


def orthonormal(matrix: Floats) -> Floats:
    """The columns at right angles and of length 1; those that depend on others become zero."""
    columns: list[Doubles] = []
    for index in range(matrix.shape[1]):
        column = matrix[:, index].astype(np.float64)
        length = sqrt(dot(column, column))
        for other in columns * 2:  # twice: the first time leaves rounding behind
            column -= dot(column, other) * other
        left = sqrt(dot(column, column))
        column *= 1.0 / left if left > VANISHED * length else 0.0
        columns.append(column)
    return np.stack(columns, axis=1).astype(np.float32)


def product(p: Floats, q: Floats, out: Floats | None = None) -> Floats:
    """``P Qᵀ``, in ``out`` or new memory: the same bits everywhere."""
    total = np.empty((len(p), len(q)), np.float32) if out is None else out
    for rows, block in _blocks(p, q):
        total[rows] = block
    return total


def take_away(matrix: Floats, p: Floats, q: Floats) -> None:
    """Subtract ``P Qᵀ`` from a matrix, in place."""
    for rows, block in _blocks(p, q):
        matrix[rows] -= block


def _blocks(p: Floats, q: Floats) -> Iterator[tuple[slice, Floats]]:
    """Some rows of ``P Qᵀ`` at a time, which stay in the cache; one column after the other."""
    height = max(1, CHUNK // max(1, len(q)))
    total, term = np.empty((2, min(height, len(p)), len(q)), np.float32)
    for start in range(0, len(p), height):
        part = p[start : start + height]
        block, more = total[: len(part)], term[: len(part)]
        np.multiply.outer(part[:, 0], q[:, 0], out=block)
        for index in range(1, p.shape[1]):
            np.multiply.outer(part[:, index], q[:, index], out=more)
            block += more
        yield slice(start, start + len(part)), block


def pack(p: Floats, q: Floats) -> ByteArray:
    """Both, as bytes."""
    head = np.frombuffer(_HEAD.pack(len(p), len(q), p.shape[1]), np.uint8)
    parts = (head, *(np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (p, q)))
    return np.concatenate(parts)


def unpack(data: ByteArray, total: int) -> Floats:
    """The vector of ``total`` values that received bytes stand for."""
    head, rest = take_front(data, _HEAD.size, "The head of two matrices")
    rows, columns, rank = _HEAD.unpack(head.tobytes())
    if rows == columns == rank == 0 and rest.size == 4 * total:
        return rest.copy().view(np.float32)
    if rows * columns != total or not rank or 4 * rank * (rows + columns) != rest.size:
        raise MalformedFrame(
            f"Matrices of {rows} and {columns} rows and {rank} columns for {total} values "
            f"in {rest.size} bytes"
        )
    both = rest.copy().view(np.float32)
    split = rows * rank
    return product(both[:split].reshape(rows, rank), both[split:].reshape(columns, rank)).reshape(
        -1
    )
