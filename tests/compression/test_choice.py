"""Which compression pays."""

import numpy as np
import pytest

from potluck._types import LinkMatrix
from potluck.compression.base import CompressionContext
from potluck.compression.choice import CANDIDATES, FAST, SMALL, Speed, choose, method_for
from potluck.compression.strategy import CompressionStrategy

SPEEDS = {
    CANDIDATES[1]: Speed(4_000_000_000, 10_000_000_000),
    CANDIDATES[2]: Speed(2_500_000_000, 5_000_000_000),
    CANDIDATES[3]: Speed(2_000_000_000, 10_000_000_000),
}


def links(rate: int, size: int = 4) -> LinkMatrix:
    """Equal links."""
    return LinkMatrix.uniform(size, rate=rate, latency=100_000)


@pytest.mark.parametrize(
    ("rate", "count", "has_feedback", "chosen"),
    [
        (125_000_000, 1 << 24, False, "int8"),
        (125_000_000, 1 << 24, True, "int8"),
        (6_250_000, 1 << 24, True, "int8"),
        (FAST, 1 << 24, True, "none"),
        (125_000_000, 1000, True, "none"),
        (0, 1 << 24, True, "none"),
    ],
)
def test_slow_links_are_worth_it(rate: int, count: int, has_feedback: bool, chosen: str) -> None:
    """Fast ones, small arrays and links that nobody knows are not."""
    choice = choose(links(rate), count, SPEEDS, has_feedback=has_feedback)
    assert str(choice.strategy) == chosen
    assert choice.is_known == bool(rate or count < 10_000)


def test_a_slow_encoder_is_not_used() -> None:
    """What it gains on the wire it loses in the machine."""
    slow = {each: Speed(50_000_000, 50_000_000) for each in CANDIDATES[1:]}
    choice = choose(links(125_000_000), 1 << 24, slow, has_feedback=True)
    assert choice.strategy == CompressionStrategy.NONE
    assert "either way" in choice.reason


def test_the_gentler_is_taken_where_both_cost_alike() -> None:
    """bfloat16 instead of int8, if int8 is hardly faster."""
    speeds = {**SPEEDS, CANDIDATES[2]: Speed(350_000_000, 5_000_000_000)}
    choice = choose(links(125_000_000), 1 << 24, speeds)
    assert choice.strategy == CompressionStrategy.BFLOAT16


def test_one_slow_link_counts() -> None:
    """The slowest decides, and is named."""
    rates = (FAST, FAST, FAST, 12_500_000)
    matrix = LinkMatrix(rates, rates, links(FAST).latency)
    choice = choose(matrix, 1 << 24, SPEEDS)
    assert choice.strategy == CompressionStrategy.INT8
    assert "at 12.5 MB/s" in choice.reason


def test_alone_there_is_nothing_to_send() -> None:
    """One rank needs no compression."""
    assert choose(links(1, size=1), 1 << 24, SPEEDS).strategy == CompressionStrategy.NONE


@pytest.mark.parametrize(("rate", "chosen"), [(125_000_000, "int8"), (FAST, "none")])
def test_16_bits_are_not_made_16_bits(rate: int, chosen: str) -> None:
    """What takes two bytes as it is gains nothing by bfloat16, and pays less to stay as it is."""
    choice = choose(links(rate), 1 << 24, SPEEDS, itemsize=2)
    assert str(choice.strategy) == chosen
    slow_int8 = {**SPEEDS, CANDIDATES[2]: Speed(60_000_000, 60_000_000)}
    assert str(choose(links(rate), 1 << 24, slow_int8, itemsize=2).strategy) == "none"


def test_small_arrays_are_measured_in_bytes() -> None:
    """Of which 16-bit values have half as many."""
    count = SMALL // 4
    assert choose(links(1_000_000), count, SPEEDS).strategy != CompressionStrategy.NONE
    assert choose(links(1_000_000), count, SPEEDS, itemsize=2).strategy == CompressionStrategy.NONE


def test_what_leaves_most_of_a_step_behind_is_taken_on_request_only() -> None:
    """And with error feedback; without the request the reason says what is forgone."""
    few = links(125_000_000), 1 << 24, SPEEDS
    assert str(choose(*few, has_feedback=True, aggressive=True).strategy) == "topk:0.01"
    assert str(choose(*few, aggressive=True).strategy) == "int8"
    safe = choose(*few, has_feedback=True)
    assert "topk:0.01 would take" in safe.reason
    assert "only auto:aggressive takes it" in safe.reason
    assert "aggressive" not in choose(*few).reason


def gradients(kind: str, source: np.random.Generator) -> np.ndarray:
    """Values as gradients have them: one scale, tails of several weights, few large ones."""
    count, signs = 1 << 16, source.choice([-1.0, 1.0], 1 << 16)
    match kind.partition(" "):
        case ("normal", _, _):
            values = source.standard_normal(count)
        case ("student", _, degrees):
            values = source.standard_t(float(degrees), count)
        case ("lognormal", _, width):
            values = source.lognormal(0.0, float(width), count) * signs
        case ("pareto", _, shape):
            values = source.pareto(float(shape), count) * signs
        case ("outliers", _, factor):
            values = source.standard_normal(count)
            values[source.random(count) < 0.01] *= float(factor)
        case _:
            values = source.laplace(size=count)
    return values.astype(np.float32)


@pytest.mark.parametrize("strategy", CANDIDATES[1:3], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        *("normal", "laplace", "student 3", "student 2", "student 1.5", "student 1"),
        *("lognormal 1", "lognormal 2", "lognormal 3", "pareto 1.5"),
        *("outliers 10", "outliers 30", "outliers 100", "outliers 1000"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_what_auto_takes_loses_less_than_two_per_cent(
    strategy: CompressionStrategy, kind: str, ranks: int
) -> None:
    """Of the length of a sum: contributions are encoded, and then the result."""
    source, method = np.random.default_rng(ranks), method_for(strategy)
    parts = [gradients(kind, source) for _ in range(ranks)]

    def passed_on(values: np.ndarray) -> np.ndarray:
        return method.decode(method.encode(values, CompressionContext(values.shape)), values.size)

    right = np.sum(parts, axis=0, dtype=np.float64)
    total = np.stack([passed_on(part) for part in parts]).sum(axis=0)
    found = passed_on(total)
    assert np.linalg.norm(found - right) < 0.02 * np.linalg.norm(right)
