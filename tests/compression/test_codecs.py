"""What all codecs promise: sizes known beforehand, nothing hidden, nothing believed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame
from potluck.compression.base import ByteArray, Codec, Floats
from potluck.compression.codecs import (
    BLOCK,
    NAMES,
    ONEBIT_BLOCK,
    SMALLEST,
    BFloat16,
    Float16,
    Float32,
    Int8,
    OneBit,
    SixteenBit,
    codec_for,
)
from potluck.compression.strategy import QuantizationType
from potluck.schedule.reduce import quiet
from support.gradients import normal, relative_error, vectors

CODECS: list[Codec] = [Float32(), *(codec_for(kind) for kind in QuantizationType)]
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
    raw = np.resize(np.frombuffer(data or b"\0", np.uint8), size)
    try:
        codec.decode(raw, np.empty(count, np.float32))
    except MalformedFrame:
        assert codec.name in {"int8", "onebit"}


@codecs
def test_a_codec_allocates_nothing_large_for_each_piece(codec: Codec) -> None:
    """Encoding twice gives the same bytes: scratch memory carries nothing over."""
    first, second = normal(5000, seed=1), normal(3000, seed=2)
    expected = codec.packed(first)
    codec.packed(second)
    assert (codec.packed(first) == expected).all()


# --------------------------------------------------------------------------------------------------
# float16 and bfloat16: saturation instead of overflow.


@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=lambda codec: codec.name)
def test_too_large_becomes_the_largest(codec: SixteenBit) -> None:
    """What is finite stays finite; infinity and NaN stay what they are."""
    largest = np.finfo(np.float32).max
    values = np.array([largest, -largest, 1.0, np.inf, -np.inf, np.nan], np.float32)
    found = np.empty_like(values)
    codec.decode(codec.packed(values), found)
    assert found[:5].tolist() == [codec.largest, -codec.largest, 1.0, np.inf, -np.inf]
    assert np.isnan(found[5])


def test_the_largest_numbers_are_those_of_the_types() -> None:
    """One more step would be infinite."""
    assert Float16.largest == float(np.finfo(np.float16).max)
    step = np.array([BFloat16.largest], np.float32).view(np.uint32) + 0x10000
    assert np.isinf(step.view(np.float32)[0])


# --------------------------------------------------------------------------------------------------
# int8: blocks, scales, rounding.


def decoded(data: ByteArray, count: int) -> Floats:
    """The values in some bytes."""
    values = np.empty(count, np.float32)
    Int8().decode(data, values)
    return values


@given(values=vectors())
def test_the_error_is_at_most_half_a_step_of_the_block(values: Floats) -> None:
    """Rounded to the nearest, not cut off; a step is the block's largest value / 127."""
    found = decoded(Int8().packed(values), values.size)
    for start in range(0, values.size, BLOCK):
        part = values[start : start + BLOCK].astype(np.float64)
        top = np.abs(part).max()
        allowed = top if top < SMALLEST else top / 127 * 0.50001
        assert np.abs(found[start : start + BLOCK] - part).max() <= allowed


def test_the_largest_value_of_a_block_is_kept() -> None:
    """So the range of a gradient does not shrink from hop to hop."""
    values = normal(BLOCK)
    place = np.abs(values).argmax()
    np.testing.assert_allclose(decoded(Int8().packed(values), BLOCK)[place], values[place], 1e-6)


def test_a_bad_block_spoils_no_other() -> None:
    """NaN in one block turns that block into NaN, and leaves its neighbours alone."""
    values = normal(3 * BLOCK)
    values[BLOCK + 5] = np.inf
    found = decoded(Int8().packed(values), values.size).reshape(3, BLOCK)
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("odd", [None, np.nan, np.inf, 3.4e38, 1e-42])
@pytest.mark.parametrize("seed", [None, 5])
def test_what_is_left_behind_is_what_a_decoder_misses(odd: float | None, seed: int | None) -> None:
    """Also of a last block that is not full, and beside a block of odd numbers."""
    values = np.random.default_rng(1).normal(size=5 * BLOCK + 17).astype(np.float32)
    if odd is not None:
        values[BLOCK : 2 * BLOCK] = odd
    coded = np.empty(Int8.size(values.size), np.uint8)
    left, back = np.empty_like(values), np.empty_like(values)
    with quiet():
        is_finite = Int8(seed).encode_leaving(values, coded, left)
        Int8().decode(coded, back)
        expected = values - back
    assert (coded == Int8(seed).packed(values)).all()
    assert np.array_equal(left, expected, equal_nan=True)
    assert is_finite == (odd is None)


def test_rounding_by_chance_is_right_on_average() -> None:
    """The mean of many encodings comes as near to the value as chance allows; nearest does not."""
    values = np.full(BLOCK, 0.3, np.float32)
    values[0] = 127.0  # a step of 1
    codec = Int8(seed=5)
    by_chance = [decoded(codec.packed(values), BLOCK)[1:].mean() for _ in range(40)]
    assert abs(np.mean(by_chance) - 0.3) < 5 * (0.21 / (255 * 40)) ** 0.5
    assert decoded(Int8().packed(values), BLOCK)[1:].max() == 0.0


def test_the_same_seed_rounds_the_same() -> None:
    """Chance comes from the seed alone."""
    values = normal(1000)
    assert (Int8(seed=3).packed(values) == Int8(seed=3).packed(values)).all()
    assert (Int8(seed=3).packed(values) != Int8(seed=4).packed(values)).any()


@pytest.mark.parametrize("scale", [np.inf, -np.inf, -1.0, -0.0, 3e38, -np.nan])
def test_a_scale_that_no_encoder_writes_is_refused(scale: float) -> None:
    """Infinite, negative, too large, or another NaN than the agreed one."""
    data = Int8().packed(np.ones(BLOCK, np.float32))
    data[:4].view(np.float32)[0] = scale
    with pytest.raises(MalformedFrame, match="A scale of int8"):
        decoded(data, BLOCK)


def test_a_value_that_no_encoder_writes_is_refused() -> None:
    """−128 has no counterpart."""
    data = Int8().packed(np.ones(BLOCK, np.float32))
    data[-1] = 128
    with pytest.raises(MalformedFrame, match="−128"):
        decoded(data, BLOCK)


# --------------------------------------------------------------------------------------------------
# onebit: signs and mean magnitudes.


def test_values_become_the_mean_magnitude_with_their_sign() -> None:
    """In each block."""
    values = normal(2 * ONEBIT_BLOCK + 3)
    found = np.empty_like(values)
    OneBit().decode(OneBit().packed(values), found)
    assert ((found < 0) == (values < 0)).all()
    for start in range(0, values.size, ONEBIT_BLOCK):
        part = slice(start, start + ONEBIT_BLOCK)
        np.testing.assert_allclose(np.abs(found[part]), np.abs(values[part]).mean(), rtol=1e-5)


def test_a_value_takes_a_bit() -> None:
    """And a block four bytes more."""
    assert OneBit().size(8 * ONEBIT_BLOCK) == ONEBIT_BLOCK + 4 * 8
    assert OneBit().size(9) == 2 + 4


def test_bits_that_stand_for_nothing_are_checked() -> None:
    """One vector has one encoding."""
    data = OneBit().packed(np.ones(9, np.float32))
    data[-1] |= 0x80
    with pytest.raises(MalformedFrame, match="stand for nothing"):
        OneBit().decode(data, np.empty(9, np.float32))


def test_the_largest_magnitudes_do_not_overflow() -> None:
    """The mean of the largest numbers is not infinite."""
    values = np.full(ONEBIT_BLOCK, np.finfo(np.float32).max)
    found = np.empty_like(values)
    OneBit().decode(OneBit().packed(values), found)
    np.testing.assert_allclose(found, values, rtol=1e-4)
