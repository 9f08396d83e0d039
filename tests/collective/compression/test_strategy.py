"""Strategies by name."""

import pytest

from potluck.collective.compression.strategy import CompressionStrategy, QuantizationType


@pytest.mark.parametrize(
    "text",
    ["none", "float16", "bfloat16", "int8", "onebit", "topk:0.01", "random:0.5", "powersgd:2"],
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
    ["zip", "int8:3", "topk:0", "topk:2", "topk:nan", "random:x", "powersgd:0", "powersgd:1.5"],
)
def test_nonsense_is_refused(text: str) -> None:
    """With the text that was meant."""
    with pytest.raises(ValueError, match="is no compression"):
        CompressionStrategy.named(text)
