"""Strategies by name."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.compression.strategy import CompressionStrategy, QuantizationType


@pytest.mark.parametrize(
    "text",
    [
        *("none", "float16", "bfloat16", "int8", "onebit", "topk:0.01", "random:0.5"),
        *("powersgd:2", "auto", "auto:aggressive"),
    ],
)
def test_a_strategy_is_named_by_its_text(text: str) -> None:
    """And its expression makes it again."""
    strategy = CompressionStrategy.named(text)
    assert str(strategy) == text
    assert eval(repr(strategy)) == strategy  # noqa: S307 - our own text


@pytest.mark.parametrize(
    ("alias", "text"),
    [("FP16", "float16"), ("bf16", "bfloat16"), ("1-bit", "onebit"), ("top_k:0.5", "topk:0.5")],
)
def test_people_write_them_in_other_ways_too(alias: str, text: str) -> None:
    """Upper case, hyphens, the names of the types."""
    assert str(CompressionStrategy.named(alias)) == text


def test_quantization_has_a_type() -> None:
    """Others have none."""
    for kind in QuantizationType:
        assert CompressionStrategy.quantize(kind).quantization is kind
    assert CompressionStrategy.top_k(0.1).quantization is None
    assert not CompressionStrategy.NONE.is_lossy


@pytest.mark.parametrize(
    "text",
    [
        *("", "zip", "int8:3", "topk:", "topk:0", "topk:2", "topk:-0.5", "topk:nan", "topk:inf"),
        *("random:x", "powersgd:0", "powersgd:1.5", "powersgd:nan", "powersgd:1025"),
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    """With the text that was meant."""
    with pytest.raises(ValueError, match=r"Unknown compression|not a valid compression"):
        CompressionStrategy.named(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("int9", "int8"), ("floot16", "float16"), ("top", "topk"), ("power_sdg:4", "powersgd")],
)
def test_a_near_miss_is_named(text: str, meant: str) -> None:
    """And all that there is."""
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'.*topk:RATIO"):
        CompressionStrategy.named(text)


@given(
    st.one_of(
        st.builds(CompressionStrategy.top_k, st.floats(0, 1, exclude_min=True)),
        st.builds(CompressionStrategy.random, st.floats(0, 1, exclude_min=True)),
        st.builds(CompressionStrategy.power_sgd, st.integers(1, 1024)),
    )
)
def test_a_text_loses_nothing(strategy: CompressionStrategy) -> None:
    """Not a digit, nor the sign of an exponent."""
    assert CompressionStrategy.named(str(strategy)) == strategy


@pytest.mark.parametrize(
    "make",
    [
        lambda: CompressionStrategy("zip"),
        lambda: CompressionStrategy("topk"),
        lambda: CompressionStrategy("int8", 4.0),
        lambda: CompressionStrategy.power_sgd(2.5),  # type: ignore[arg-type]
        lambda: CompressionStrategy.quantize("topk"),
    ],
)
def test_none_can_be_made_that_no_method_does(make: Callable[[], object]) -> None:
    """However it is made."""
    with pytest.raises(
        ValueError,
        match=r"Unknown compression|not a number format|the ratio|the rank|takes no number",
    ):
        make()


def test_anything_else_is_refused_with_what_there_is() -> None:
    """A number, for instance."""
    with pytest.raises(TypeError, match=r"a name such as 'int8'.*not 8"):
        CompressionStrategy.of(8)  # type: ignore[arg-type]
    assert CompressionStrategy.of(QuantizationType.INT8) == CompressionStrategy.INT8
    assert CompressionStrategy.of(CompressionStrategy.NONE) is CompressionStrategy.NONE
