"""Compressed gradients as bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame
from potluck.collective.compression.codecs import CODECS
from potluck.collective.compression.compressor import GradientCompressor
from potluck.collective.compression.packing import CompressedGradient
from potluck.collective.compression.registry import METHODS
from potluck.collective.compression.strategy import CompressionStrategy, QuantizationType
from support.gradients import normal

STRATEGIES = [
    "none",
    "float16",
    "bfloat16",
    "int8",
    "onebit",
    "topk:0.1",
    "topk:1e-05",
    "random:0.1",
    "powersgd:2",
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (30, 20), (5, 4, 3, 2)])
def test_bytes_stand_for_the_same_gradient(strategy: str, shape: tuple[int, ...]) -> None:
    """Whoever reads them needs nothing else."""
    compressor = GradientCompressor(strategy)
    made = compressor.compress(normal(int(np.prod(shape))).reshape(shape))
    read = CompressedGradient.from_bytes(made.to_bytes())
    assert (read.strategy, read.shape) == (made.strategy, shape)
    expected = compressor.decompress(made)
    assert expected.shape == shape
    assert GradientCompressor("none").decompress(read).tobytes() == expected.tobytes()


def test_ratios() -> None:
    """Bytes before for each byte after."""
    made = GradientCompressor("int8").compress(normal(1 << 16))
    assert made.original_size == 1 << 16
    assert made.compression_ratio == pytest.approx(3.56, abs=0.01)
    assert GradientCompressor("int8").compress(normal(0)).compression_ratio == 1.0


def test_more_values_than_the_reader_wants_are_refused() -> None:
    """A few bytes may not claim a terabyte."""
    data = GradientCompressor("topk:0.1").compress(normal(100)).to_bytes()
    assert CompressedGradient.from_bytes(data, most_values=100).original_size == 100
    with pytest.raises(MalformedFrame, match="more than 99 values"):
        CompressedGradient.from_bytes(data, most_values=99)


@given(st.sampled_from(STRATEGIES), st.data())
def test_damaged_bytes_are_read_or_refused(strategy: str, data: st.DataObject) -> None:
    """Cut off, or with a byte changed; never another error."""
    packed = bytearray(GradientCompressor(strategy).compress(normal(60).reshape(10, 6)).to_bytes())
    place = data.draw(st.integers(0, len(packed) - 1))
    if data.draw(st.booleans()):
        del packed[place:]
    else:
        packed[place] ^= data.draw(st.integers(1, 255))
    try:
        found = CompressedGradient.from_bytes(packed, most_values=1000)
        GradientCompressor("none").decompress(found)
    except MalformedFrame:
        return
    assert found.original_size <= 1000


@pytest.mark.parametrize(
    ("place", "byte", "words"),
    [
        (0, 0, "no compressed gradient"),
        (2, 9, "no compressed gradient"),
        (3, 200, "Method 200 with 1 dimensions is not known"),
        (4, 65, "with 65 dimensions is not known"),
        (15, 0x40, "No encoder writes int8:2"),
    ],
)
def test_a_head_that_nobody_writes_is_refused(place: int, byte: int, words: str) -> None:
    """Each part of it is checked."""
    data = bytearray(GradientCompressor("int8").compress(normal(10)).to_bytes())
    data[place] = byte
    with pytest.raises(MalformedFrame, match=words):
        CompressedGradient.from_bytes(data)


def test_every_method_has_a_number_for_ever() -> None:
    """What was written once must be read by every later version; new ones come at the end."""
    assert METHODS[:5] == ("none", "float16", "bfloat16", "int8", "onebit")
    assert METHODS[5:] == ("topk", "random", "powersgd")
    for method in METHODS:
        strategy = CompressionStrategy.named(method)
        data = CompressedGradient(strategy, (0,), np.empty(0, np.uint8)).to_bytes()
        assert CompressedGradient.from_bytes(data).strategy == strategy
    assert {kind.value for kind in QuantizationType} <= set(METHODS)
    assert set(CODECS) == set(QuantizationType)
