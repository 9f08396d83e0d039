"""How fast this machine compresses: measured once, in a few milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from potluck.collective.compression.base import Turn
from potluck.collective.compression.choice import CANDIDATES, Speed
from potluck.collective.compression.codecs import codec_for
from potluck.collective.compression.registry import method_for
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.collective.reduce import quiet

__all__ = ["encoder_speeds"]

COUNT = 1 << 18
"""Values to measure with: more than the nearest cache holds."""

REPEATS = 3
"""The quickest counts: noise only ever adds time."""


@lru_cache(maxsize=1)
def encoder_speeds() -> dict[CompressionStrategy, Speed]:
    """For each method that can be chosen."""
    raw = np.random.PCG64(0).random_raw(COUNT).astype(np.float32)
    values = raw / raw.max() - np.float32(0.5)
    with quiet():
        return {each: _measure(each, values) for each in CANDIDATES if each.is_lossy}


def _measure(
    strategy: CompressionStrategy, values: np.ndarray[tuple[int], np.dtype[np.float32]]
) -> Speed:
    kind = strategy.quantization
    if kind is None:
        method, turn = method_for(strategy), Turn(values.shape)
        data = method.encode(values, turn)
        return Speed(
            _rate(lambda: method.encode(values, turn)),
            _rate(lambda: method.decode(data, values.size)),
        )
    codec = codec_for(kind)
    out, back = codec.packed(values), np.empty_like(values)
    return Speed(_rate(lambda: codec.encode(values, out)), _rate(lambda: codec.decode(out, back)))


def _rate(action: Callable[[], object]) -> int:
    """Bytes of float32 per second."""
    best = 1 << 62
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        action()
        best = min(best, max(1, time.perf_counter_ns() - start))
    return 4 * COUNT * 1_000_000_000 // best
