"""Ring: every link carries the same, and nothing is stored on the way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.schedule import verify
from potluck.schedule.algorithms.ring import RING, segmented, waves
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import AlgorithmSettings, Collective, Span, Task
from potluck.schedule.verify import Deadlock, VerifyLimits


def test_every_link_carries_two_n_minus_one_nths() -> None:
    """And each rank hears only its left neighbour and tells only its right one."""
    task = Task.whole(Collective.ALL_REDUCE, 4, 400)
    for program in RING.schedule(task, AlgorithmSettings((2, 0, 3, 1), (1,) * 4)).programs:
        place = (2, 0, 3, 1).index(program.rank)
        assert list(program.outgoing) == [(0, 3, 1, 2)[place]]
        assert list(program.incoming) == [(1, 2, 0, 3)[place]]
        assert sum(step.length for step in program.steps if step.to) == 600


def test_each_rank_waits_for_nothing_but_its_neighbour() -> None:
    """What arrives leaves in the same order; sums are never stored, so no memory is needed."""
    task = Task.whole(Collective.ALL_REDUCE, 5, 100)
    for program in RING.schedule(task, AlgorithmSettings.plain(5, piece=4)).programs:
        assert not program.needs_sum
        assert all(step.length <= 4 for step in program.steps)
        (incoming,), (outgoing,) = program.incoming.values(), program.outgoing.values()
        forwarded = [index for index in incoming if index in set(outgoing)]
        assert forwarded == sorted(forwarded)


@given(st.integers(1, 12), st.integers(1, 12))
def test_waves_reach_every_turn_of_every_segment_in_time(segments: int, turns: int) -> None:
    """A segment makes its turns one after the other, a turn takes its segments in order."""
    order = list(waves(segments, turns))
    assert sorted(order) == [(s, t) for s in range(segments) for t in range(turns)]
    moment = {item: when for when, item in enumerate(order)}
    for segment, turn in order:
        assert moment[segment, turn] >= moment.get((segment, turn - 1), -1)
        assert moment[segment, turn] >= moment.get((segment - 1, turn), -1)


def test_blocks_are_cut_alike() -> None:
    """All blocks have as many segments as the longest, so that turns stay in step."""
    assert segmented([Span(0, 5), Span(5, 7), Span(7, 7)], piece=3) == [
        [Span(0, 3), Span(3, 5)],
        [Span(5, 6), Span(6, 7)],
        [Span(7, 7), Span(7, 7)],
    ]


def test_a_16_bit_sum_is_rounded_once() -> None:
    """Partial sums travel in float32: many small numbers are not lost beside a large one."""
    task = Task.whole(Collective.ALL_REDUCE, 8, 3)
    reducer = Reducer.of(ReduceOp.SUM, "f2")
    inputs = [np.full(3, 2048 if rank == 0 else 1, "f2") for rank in range(8)]
    for output in verify.run(RING.schedule(task), inputs, reducer):
        assert output.tolist() == [2056, 2056, 2056]  # rounded at each hop it would be 2048


def test_pieces_shorter_than_the_layout_says_are_not_enough() -> None:
    """The contract is sharp: with long relays and short staging, everybody waits for the next."""
    task = Task.whole(Collective.ALL_REDUCE, 3, 30)
    schedule = RING.schedule(task, AlgorithmSettings.plain(3, piece=10))
    verify.prove(schedule, limits=VerifyLimits(piece=10))
    with pytest.raises(Deadlock, match="rank 0 in step 0"):
        verify.prove(schedule, limits=VerifyLimits(piece=1))
