"""What all codecs promise: sizes known beforehand, nothing hidden, nothing believed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame
from potluck.collective.compression.base import Codec, Floats
from potluck.collective.compression.codecs import NAMES, codec_for
from potluck.collective.compression.none import Plain
from potluck.collective.compression.strategy import QuantizationType
from support.gradients import normal, relative_error, vectors

CODECS: list[Codec] = [Plain(), *(codec_for(kind) for kind in QuantizationType)]
ERRORS = {"none": 0.0, "float16": 3e-4, "bfloat16": 3e-3, "int8": 8e-3, "onebit": 0.61}

codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def round_trip(codec: Codec, values: Floats) -> Floats:
    """There and back."""
    found = np.full(values.size, 113, np.float32)
    codec.decode(codec.packed(values), found)
    return found


def test_numbers_tell_codecs_apart() -> None:
    """Zero is left for "no codec"."""
    assert len({codec.number for codec in CODECS} | {0}) == len(CODECS) + 1
    assert NAMES[codec_for(QuantizationType.INT8).number] == "int8"


@codecs
def test_the_error_on_normal_data_is_as_documented(codec: Codec) -> None:
    """For lengths that are no multiple of a block or a chunk as well."""
    for count in (1000, 70_001, 200_000):
        values = normal(count)
        assert relative_error(round_trip(codec, values), values) <= ERRORS[codec.name]


@codecs
@given(values=vectors())
def test_what_is_finite_stays_finite(codec: Codec, values: Floats) -> None:
    """Whatever the magnitudes, from denormal to the largest of all."""
    assert np.isfinite(round_trip(codec, values)).all()


@codecs
@given(values=vectors(finite=False))
def test_what_is_no_number_is_never_hidden(codec: Codec, values: Floats) -> None:
    """Where NaN or infinity went in, something of the kind comes out."""
    found = round_trip(codec, values)
    assert not np.isfinite(found[~np.isfinite(values)]).any()


@codecs
@given(values=vectors())
def test_encoding_what_was_decoded_changes_little_or_nothing(codec: Codec, values: Floats) -> None:
    """A second time loses nothing worth mentioning: no drift when results are passed on."""
    once = round_trip(codec, values)
    twice = round_trip(codec, once)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(twice, once, rtol=1e-5, atol=1e-30)


@codecs
@pytest.mark.parametrize("count", [0, 1, 7, 255, 256, 257, 1024, 1025, 65_536, 65_537])
def test_zeros_stay_zeros(codec: Codec, count: int) -> None:
    """Empty tensors and all-zero blocks are ordinary."""
    assert not round_trip(codec, np.zeros(count, np.float32)).any()


@codecs
@given(values=vectors(most=64), change=st.integers(-3, 3).filter(bool))
def test_another_length_is_refused(codec: Codec, values: Floats, change: int) -> None:
    """The decoder knows how many bytes there must be."""
    data = codec.packed(values)
    size = max(0, data.size + change)
    if size != data.size:
        with pytest.raises(MalformedFrame, match=f"{values.size} values as {codec.name}"):
            codec.decode(np.resize(data, size) if data.size else np.zeros(size, np.uint8), values)


@codecs
@given(data=st.binary(max_size=600), count=st.integers(0, 2000))
def test_any_bytes_are_decoded_or_refused(codec: Codec, data: bytes, count: int) -> None:
    """Fuzzing ends in numbers or in one kind of error."""
    size = codec.size(count)
    octets = np.resize(np.frombuffer(data or b"\0", np.uint8), size)
    try:
        codec.decode(octets, np.empty(count, np.float32))
    except MalformedFrame:
        assert codec.name in {"int8", "onebit"}


@codecs
def test_a_codec_allocates_nothing_large_for_each_piece(codec: Codec) -> None:
    """Encoding twice gives the same bytes: scratch memory carries nothing over."""
    first, second = normal(5000, seed=1), normal(3000, seed=2)
    expected = codec.packed(first)
    codec.packed(second)
    assert (codec.packed(first) == expected).all()
