"""Which compression pays."""

import pytest

from potluck.collective.compression.choice import CANDIDATES, FAST, SMALL, Speed, choose
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.vocabulary import LinkMatrix

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
        (125_000_000, 1 << 24, True, "topk:0.01"),
        (6_250_000, 1 << 24, True, "topk:0.01"),
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
