"""Quantised all-reduce: the same bits on all ranks, nothing lost that is not written down."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import Aborted, CollectiveMismatch, MalformedFrame
from potluck.backend import simulated
from potluck.collective import planner
from potluck.collective.compression.base import Floats, Octets
from potluck.collective.compression.int8 import Int8
from potluck.collective.compression.strategy import QuantizationType
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.runtime import session
from potluck.runtime.call import Call
from potluck.runtime.group import Group
from support.gradients import normal, relative_error
from support.groups import LIMIT, in_world, sum_call

kinds = pytest.mark.parametrize("kind", list(QuantizationType), ids=lambda kind: kind.value)
ALLOWED = {"float16": 5e-4, "bfloat16": 5e-3, "int8": 1e-2, "onebit": 0.8}


def reduced(
    data: list[Floats], kind: QuantizationType, op: ReduceOp = ReduceOp.SUM
) -> list[tuple[Floats, Floats]]:
    """What each rank ends with, and what it leaves behind."""

    def action(group: Group) -> tuple[Floats, Floats]:
        array = data[group.rank].copy()
        left = np.full(array.size, 113, np.float32)
        call = replace(sum_call(array, len(data)), reducer=Reducer.of(op, np.float32))
        group.run(replace(call, codec=kind, residual=left), LIMIT)
        return array, left

    outcomes = in_world(len(data), action)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value] # no error is among them


@kinds
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 1000, 300_001])
def test_all_ranks_end_with_the_same_bits(kind: QuantizationType, size: int, count: int) -> None:
    """Short operations and long ones, in pieces."""
    data = [normal(count, seed) for seed in range(size)]
    ends = reduced(data, kind)
    assert len({array.tobytes() for array, _ in ends}) == 1
    if count >= 1000:
        assert relative_error(ends[0][0], np.stack(data).sum(axis=0)) <= ALLOWED[kind.value]


@kinds
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_what_is_left_behind_is_what_is_missing(kind: QuantizationType, op: ReduceOp) -> None:
    """Contributions and results: added to the next gradients, nothing is lost for good."""
    data = [normal(70_000, seed) for seed in range(3)]
    ends = reduced(data, kind, op)
    factor = 3 if op is ReduceOp.MEAN else 1
    found = factor * ends[0][0].astype(np.float64) + sum(left for _, left in ends)
    np.testing.assert_allclose(found, np.sum(data, axis=0, dtype=np.float64), atol=2e-5)


@settings(max_examples=15)
@given(
    kind=st.sampled_from(QuantizationType),
    size=st.integers(2, 4),
    count=st.integers(0, 3000),
    scale=st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e30]),
)
def test_any_magnitude_on_any_number_of_ranks(
    kind: QuantizationType, size: int, count: int, scale: float
) -> None:
    """Zeros, denormals, large ones: finite and the same everywhere."""
    data = [normal(count, seed) * np.float32(scale) for seed in range(size)]
    ends = reduced(data, kind)
    assert len({array.tobytes() for array, _ in ends}) == 1
    assert np.isfinite(ends[0][0]).all()
    assert all(np.isfinite(left).all() for _, left in ends)


@kinds
def test_what_is_no_number_reaches_all_ranks(kind: QuantizationType) -> None:
    """One rank's NaN is not hidden, and stays in nobody's memory."""
    data = [normal(5000, seed) for seed in range(3)]
    data[1][4321] = np.nan
    for array, left in reduced(data, kind):
        assert not np.isfinite(array[4321])
        assert np.isfinite(array[:1000]).all()
        assert np.isfinite(left).all()


@kinds
@pytest.mark.parametrize("is_short", [False, True], ids=["pumped", "straight"])
@pytest.mark.parametrize("size", [2, 4])
def test_nothing_is_mixed_up_in_narrow_streams(
    kind: QuantizationType, size: int, monkeypatch: pytest.MonkeyPatch, *, is_short: bool
) -> None:
    """What waits for its stream is not overwritten by what waits behind it."""
    monkeypatch.setattr(simulated, "STREAM_CAPACITY", 96)
    monkeypatch.setattr(session, "SHORT", 1 << 40 if is_short else -1)
    monkeypatch.setattr(planner, "piece_for", lambda *_: 200)
    data = [normal(2500, seed) for seed in range(size)]
    ends = reduced(data, kind)
    assert len({array.tobytes() for array, _ in ends}) == 1
    found = ends[0][0].astype(np.float64) + sum(left for _, left in ends)
    np.testing.assert_allclose(found, np.sum(data, axis=0, dtype=np.float64), atol=2e-5)


def test_ranks_that_disagree_about_the_format_are_told() -> None:
    """The format is part of what they compare."""

    def action(group: Group) -> None:
        kind = QuantizationType.INT8 if group.rank else QuantizationType.BF16
        group.run(replace(sum_call(normal(1000), 2), codec=kind), LIMIT)

    outcomes = in_world(2, action)
    assert all(isinstance(outcome, CollectiveMismatch) for outcome in outcomes)
    assert "as int8" in str(outcomes[0])
    assert "as bfloat16" in str(outcomes[0])


class Liar(Int8):
    """Writes a scale that no encoder writes."""

    def encode(self, values: Floats, out: Octets) -> None:
        """As usual, but for the first scale."""
        super().encode(values, out)
        out[:4].view(np.float32)[0] = -1.0


def test_a_piece_that_cannot_be_decoded_ends_it_on_all_ranks() -> None:
    """With the name of the rank that sent it; the group works again afterwards."""

    def action(group: Group) -> tuple[str, float]:
        call = replace(sum_call(normal(50_000), 3), codec=QuantizationType.INT8)
        if group.rank == 2:
            group._plans._codecs[QuantizationType.INT8] = Liar()
        with pytest.raises((MalformedFrame, Aborted)) as caught:
            group.run(call, LIMIT)
        group._plans._codecs.clear()
        array = np.ones(10, np.float32)
        group.run(Call(sum_call(array, 3).task, array, array, call.reducer), LIMIT)
        return str(caught.value), float(array[0])

    outcomes = in_world(3, action)
    texts = []
    for outcome in outcomes:
        assert isinstance(outcome, tuple), outcome
        texts.append(outcome[0])
        assert outcome[1] == 3.0
    # A receiver finds it, or rank 2 itself, which also decodes what it made: whichever is first.
    assert all("Rank 2" in text and "cannot be decoded" in text for text in texts[:2]), texts
