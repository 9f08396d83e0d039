"""GradientCompressor: nothing is lost for good."""

import io
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame
from potluck.compression.base import Codec
from potluck.compression.choice import METHODS
from potluck.compression.codecs import CODECS, Float16, Int8
from potluck.compression.compressor import (
    CompressedGradient,
    GradientCompressor,
    StagedArrays,
    forget_the_unreal,
)
from potluck.compression.strategy import CompressionStrategy, QuantizationType
from potluck.schedule.reduce import quiet
from support.gradients import normal

LOSSY = ["float16", "bfloat16", "int8", "onebit", "topk:0.1", "random:0.1", "powersgd:2"]
lossy = pytest.mark.parametrize("strategy", LOSSY)


@lossy
def test_with_feedback_everything_arrives_in_the_end(strategy: str) -> None:
    """What was sent, and what is left behind, is what went in: for every lossy method."""
    compressor = GradientCompressor(strategy)
    sent, given_ = np.zeros((40, 30)), np.zeros((40, 30))
    for step in range(30):
        gradient = normal(1200, seed=step).reshape(40, 30)
        given_ += gradient
        sent += compressor.decompress(compressor.compress(gradient, "w"))
    left = compressor.residuals["w"].reshape(40, 30)
    np.testing.assert_allclose(sent + left, given_, atol=1e-3)


@pytest.mark.parametrize("strategy", ["int8", "onebit", "topk:0.1", "random:0.1", "powersgd:2"])
def test_feedback_beats_none(strategy: str) -> None:
    """The same gradient again and again: the mean of what was sent comes near to it."""
    gradient = normal(1200).reshape(40, 30)
    errors = []
    for has_feedback in (True, False):
        compressor = GradientCompressor(strategy, has_feedback)
        total = sum(compressor.decompress(compressor.compress(gradient)) for _ in range(60))
        errors.append(np.linalg.norm(total / 60 - gradient))
    assert errors[0] < 0.7 * errors[1]


@lossy
def test_a_step_that_is_not_committed_changes_nothing(strategy: str) -> None:
    """Repeated after a failure, it makes the same bytes."""
    compressor = GradientCompressor(strategy, auto_commit=False)
    gradient = normal(1200).reshape(40, 30)
    compressor.compress(gradient, "w")
    compressor.commit()
    first = compressor.compress(gradient, "w").to_bytes()
    compressor.discard()
    second = compressor.compress(gradient, "w").to_bytes()
    compressor.commit()
    assert first == second != compressor.compress(gradient, "w").to_bytes()


@lossy
def test_a_checkpoint_goes_on_where_it_was_saved(strategy: str) -> None:
    """With all that was left behind and kept."""
    compressor, other = GradientCompressor(strategy, seed=4), GradientCompressor(strategy)
    gradient = normal(1200).reshape(40, 30)
    for _ in range(3):
        compressor.compress(gradient, "w")
    other.load_state_dict(compressor.state_dict())
    assert other.compress(gradient, "w").to_bytes() == compressor.compress(gradient, "w").to_bytes()


@lossy
def test_a_checkpoint_may_go_through_a_text(strategy: str) -> None:
    """Arrays become lists, and nothing is lost by it."""
    compressor, other = GradientCompressor(strategy), GradientCompressor(strategy)
    gradient = normal(1200).reshape(40, 30)
    for _ in range(2):
        compressor.compress(gradient, "w")
    text = json.dumps(compressor.state_dict(), default=np.ndarray.tolist)
    other.load_state_dict(json.loads(text))
    assert other.compress(gradient, "w").to_bytes() == compressor.compress(gradient, "w").to_bytes()


def test_a_checkpoint_may_go_through_numpy() -> None:
    """Numbers and texts become arrays without dimensions."""
    compressor, other = GradientCompressor("powersgd:2", seed=-3), GradientCompressor("powersgd:2")
    gradient = normal(1200).reshape(40, 30)
    compressor.compress(gradient, "w")
    file = io.BytesIO()
    state = compressor.state_dict()
    arrays = {
        f"{part}/{name}": array
        for part in ("residuals", "kept")
        for name, array in state[part].items()
    }
    np.savez(file, **{key: state[key] for key in ("strategy", "seed", "step")}, **arrays)
    file.seek(0)
    read: dict[str, Any] = {"residuals": {}, "kept": {}}
    for key, array in np.load(file).items():
        part, _, name = key.partition("/")
        (read[part] if name else read)[name or key] = array
    other.load_state_dict(read)
    assert other.compress(gradient, "w").to_bytes() == compressor.compress(gradient, "w").to_bytes()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"kept": ...}, "not the state of a GradientCompressor: kept is missing"),
        ({"step": -1}, "A step is a whole number"),
        ({"step": 1.5}, "A step is a whole number"),
        ({"step": "many"}, "A step is a whole number"),
        ({"seed": None}, "A seed is a whole number"),
        ({"residuals": [1.0]}, "arrays by the names of their tensors, not list"),
        ({"residuals": {"w": "x"}}, "tensor 'w' is not an array of numbers"),
        ({"residuals": {"w": [[1.0], [2.0, 3.0]]}}, "tensor 'w' is not an array of numbers"),
        ({"residuals": {"w": [[1.0]]}}, "tensor 'w' has 2 dimensions"),
        ({"residuals": {"w": [float("nan")]}}, "tensor 'w' holds NaN"),
        ({"kept": {"w": [1.0]}}, "tensor 'w' has 1 dimensions"),
    ],
)
def test_a_damaged_checkpoint_changes_nothing(damage: dict[str, Any], words: str) -> None:
    """The error says what is wrong with it; what was known before is still known."""
    compressor = GradientCompressor("int8")
    compressor.compress(normal(100), "w")
    before = compressor.state_dict()
    state = {**GradientCompressor("int8").state_dict(), **damage}
    damaged = {key: value for key, value in state.items() if value is not ...}
    with pytest.raises(ValueError, match=words):
        compressor.load_state_dict(damaged)
    after = compressor.state_dict()
    assert after["residuals"]["w"].tobytes() == before["residuals"]["w"].tobytes()
    assert after["step"] == before["step"] == 1


@pytest.mark.parametrize("seed", [1 << 53, 1.5, "x", None])
def test_a_seed_that_cannot_travel_is_refused(seed: Any) -> None:
    """At once, and not in the middle of an operation."""
    with pytest.raises(ValueError, match="A seed is a whole number"):
        GradientCompressor("random:0.1", seed=seed)


def test_a_checkpoint_of_another_strategy_is_refused() -> None:
    """Its residue means nothing here."""
    with pytest.raises(ValueError, match="Saved for int8, but this compresses by onebit"):
        GradientCompressor("onebit").load_state_dict(GradientCompressor("int8").state_dict())


def test_tensors_are_told_apart_by_name() -> None:
    """One size for each; another is a mistake worth a sentence."""
    compressor = GradientCompressor("topk:0.1")
    compressor.compress(normal(100), "a")
    compressor.compress(normal(50), "b")
    with pytest.raises(ValueError, match="tensor 'a' has 50 values, but 100 before"):
        compressor.compress(normal(50), "a")
    compressor.reset_error_feedback()
    compressor.compress(normal(50), "a")


@given(st.sampled_from(LOSSY), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_no_number_shows_once_and_does_not_stay(strategy: str, bad: float) -> None:
    """The step is spoiled, those after it are not."""
    compressor = GradientCompressor(strategy)
    gradient = normal(1200).reshape(40, 30)
    gradient[:, 7] = bad
    found = compressor.decompress(compressor.compress(gradient))
    assert not np.isfinite(found).all()
    clean = compressor.decompress(compressor.compress(normal(1200, 1).reshape(40, 30)))
    assert np.isfinite(compressor.residuals[""]).all()
    assert np.isfinite(clean).all()


def test_the_ratio_is_that_of_everything_so_far() -> None:
    """One before the first."""
    compressor = GradientCompressor("topk:0.01")
    assert compressor.compression_ratio == 1.0
    compressor.compress(normal(100_000))
    assert 70 < compressor.compression_ratio < 85


def test_nothing_lossy_needs_no_feedback() -> None:
    """None is exact."""
    compressor = GradientCompressor("none")
    assert not compressor.error_feedback
    gradient = normal(100)
    assert (compressor.decompress(compressor.compress(gradient)) == gradient).all()
    assert "CompressionStrategy.NONE" in repr(compressor)


def test_gradients_come_in_many_kinds() -> None:
    """Of 16 or 64 bits, of whole numbers, in lists, in the other order of bytes, of PyTorch."""
    import torch

    compressor = GradientCompressor("none")
    for gradient in (
        np.array([1, 2, 3], np.float16),
        np.array([1, 2, 3], ml_dtypes.bfloat16),
        np.array([1, 2, 3], np.float64),
        np.array([1, 2, 3], ">f4"),
        np.array([1, 0, 2, 0, 3, 0], np.float32)[::2],
        [1, 2, 3],
        torch.tensor([1, 2, 3], dtype=torch.bfloat16),
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
    ):
        assert compressor.decompress(compressor.compress(gradient)).tolist() == [1, 2, 3]


@pytest.mark.parametrize("gradient", [np.ones(3, complex), b"bytes", "text", np.ones(3, bool)])
def test_what_is_no_gradient_is_refused(gradient: Any) -> None:
    """Before anything of it is lost silently."""
    with pytest.raises(TypeError):
        GradientCompressor("int8").compress(gradient)


def test_a_staged_gradient_has_what_earlier_ones_left_behind() -> None:
    """In the memory for what this one leaves; without feedback it is the gradient as it is."""
    values = normal(64)
    assert GradientCompressor("int8", error_feedback=False).staged(values, "w") is values
    compressor = GradientCompressor("topk:0.5", auto_commit=False)
    assert compressor.staged(values, "w").tolist() == values.tolist()
    compressor.discard()
    compressor.compress(values, "w")
    compressor.commit()
    left = compressor.residuals["w"].copy()
    assert left.any()
    staged = compressor.staged(values, "w")
    assert staged.tolist() == (values + left).tolist()
    compressor.fail("w")
    assert compressor.residuals["w"].tolist() == left.tolist()  # nothing of that try counts


def test_another_strategy_uses_the_same_memory() -> None:
    """So a strategy that is chosen anew for each tensor loses nothing."""
    compressor = GradientCompressor("topk:0.5")
    other = compressor.by(CompressionStrategy.of("int8"))
    assert (str(other.strategy), str(compressor.strategy)) == ("int8", "topk:0.5")
    assert other.residuals is compressor.residuals
    other.step = 9
    assert compressor.step == 9
    assert compressor.tensor("w").name == "w"


@pytest.mark.parametrize("codec", [Float16, Int8])
def test_what_a_codec_leaves_is_the_difference_to_what_arrives(codec: type[Codec]) -> None:
    """Whether it computes that on the way or afterwards."""
    values = normal(1000)
    coded, left = np.empty(codec.size(values.size), np.uint8), np.empty_like(values)
    arrived = np.empty_like(values)
    coder = codec()
    with quiet():
        coder.encode_leaving(values, coded, left)
        coder.decode(coded, arrived)
    assert np.allclose(left, values - arrived, atol=1e-6)
    assert left.any()


# --------------------------------------------------------------------------------------------------
# What is carried over changes with a commit and not before.


def test_memory_that_is_read_is_never_written() -> None:
    """Room for the new is not that of the old."""
    ledger = StagedArrays()
    ledger.room("w", 3)[:] = 1
    ledger.commit()
    ledger.room("w", 3)[:] = 2
    assert ledger["w"].tolist() == [1, 1, 1]
    ledger.commit()
    assert ledger["w"].tolist() == [2, 2, 2]


def test_a_repeated_step_starts_from_the_same() -> None:
    """After a discard nothing of it is left."""
    ledger = StagedArrays()
    ledger["w"] = np.ones(2, np.float32)
    ledger.discard()
    ledger.commit()
    assert len(ledger) == 0


def test_it_is_a_mapping() -> None:
    """Of what is committed."""
    ledger = StagedArrays()
    ledger.load({"a": [1.0], "b": [2.0]})
    del ledger["a"]
    assert list(ledger) == ["b"]
    ledger.clear()
    assert list(ledger) == []


def test_one_name_can_be_taken_back() -> None:
    """What failed, while others go on."""
    ledger = StagedArrays()
    for name in "ab":
        ledger.room(name, 2)[:] = 1
    ledger.discard("a")
    ledger.discard("c")
    ledger.commit()
    assert list(ledger) == ["b"]


def test_a_try_that_is_repeated_writes_over_the_first() -> None:
    """It needs no further memory."""
    ledger = StagedArrays()
    first = ledger.room("w", 3)
    assert ledger.room("w", 3) is first
    assert ledger.room("w", 4) is not first


# --------------------------------------------------------------------------------------------------
# Compressed gradients as bytes.

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


def test_what_a_method_keeps_follows_the_step() -> None:
    """It counts when the step does, and is forgotten with what was left behind."""
    matrix = np.arange(64, dtype=np.float32).reshape(8, 8) + np.eye(8, dtype=np.float32)
    compressor = GradientCompressor("powersgd:1", auto_commit=False)
    compressor.compress(matrix, "w")
    compressor.discard()
    assert (len(compressor.kept), len(compressor.residuals), compressor.step) == (0, 0, 0)
    compressor.compress(matrix, "w")
    compressor.commit()
    assert (list(compressor.kept), list(compressor.residuals), compressor.step) == (["w"], ["w"], 1)
    compressor.reset_error_feedback()
    assert (len(compressor.kept), len(compressor.residuals), compressor.step) == (0, 0, 1)


def test_what_is_infinite_leaves_nothing_behind() -> None:
    """In either direction, nor what is no number; the rest stays."""
    residual = np.array([1.0, np.inf, -np.inf, np.nan], np.float32)
    with quiet():
        forget_the_unreal(residual)
    assert residual.tolist() == [1.0, 0.0, 0.0, 0.0]
