"""The methods, by the strategies that ask for them."""

from __future__ import annotations

from collections.abc import Callable

from potluck.collective.compression.base import Method, Quantised
from potluck.collective.compression.codecs import CODECS
from potluck.collective.compression.none import Plain
from potluck.collective.compression.powersgd import PowerSGD
from potluck.collective.compression.randomk import RandomK
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.collective.compression.topk import TopK

__all__ = ["METHODS", "method_for"]

METHODS = ("none", "float16", "bfloat16", "int8", "onebit", "topk", "random", "powersgd")
"""In the order of the numbers that they have in a file or on the wire."""

_MAKERS: dict[str, Callable[[float], Method]] = {
    "topk": TopK,
    "random": RandomK,
    "powersgd": lambda rank: PowerSGD(int(rank)),
}


def method_for(strategy: CompressionStrategy) -> Method:
    """A new method, with scratch memory of its own."""
    strategy = strategy.concrete
    kind = strategy.quantization
    if kind is not None:
        return Quantised(CODECS[kind])
    maker = _MAKERS.get(strategy.method)
    return maker(strategy.parameter) if maker else Quantised(Plain)
