"""What members tell each other before a step is averaged, and the buffers in which it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from potluck import CollectiveMismatch, MalformedFrame
from potluck.training.averaging import (
    HEAVIEST,
    LENGTH,
    Buckets,
    DiscardedWork,
    Gradients,
    Leaf,
    Room,
    StepContribution,
    check_records,
    signature_of,
)
from potluck.training.sampler import MAX_PIECES
from potluck.training.steps import Position

RECORD = StepContribution(3, 99, 2.0, 5000, 2, ((0, 5), (9, 12)))


def leaf(name: str, size: int, dtype: str = "float32") -> Leaf:
    """A vector."""
    return Leaf(name, (size,), dtype, size)


# --- records ---


@pytest.mark.parametrize("changes", [{"step": 4}, {"signature": 5}, {"epoch": 1}])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_odd_one_of_three_is_named_by_the_others(changes: dict[str, int], odd: int) -> None:
    """Whichever rank it is; it does not blame the others itself."""
    records = [RECORD] * 3
    records[odd] = replace(RECORD, **changes)  # type: ignore[arg-type]
    for me in range(3):
        with pytest.raises((MalformedFrame, CollectiveMismatch)) as found:
            check_records(records, me)
        is_named = isinstance(found.value, MalformedFrame) and found.value.rank == odd
        assert is_named == (me != odd)


@pytest.mark.parametrize("changes", [{"step": 4}, {"signature": 5}, {"epoch": 1}])
def test_half_of_the_members_are_not_most(changes: dict[str, int]) -> None:
    """Two against two: all get the same error, which names no culprit."""
    other = replace(RECORD, **changes)  # type: ignore[arg-type]
    for me in range(4):
        with pytest.raises(CollectiveMismatch):
            check_records([RECORD, RECORD, other, other], me)


def test_a_member_without_samples_or_gradients_differs_from_none() -> None:
    """Its epoch and its signature say nothing."""
    idle = StepContribution(3, 0, 0.0, 0, 7)
    for records in ([RECORD, RECORD, idle], [idle, RECORD, RECORD]):
        for me in (0, 1, 2, None):
            check_records(records, me)


def test_a_step_needs_samples_of_one_member() -> None:
    """One is enough; none is an error."""
    idle = replace(RECORD, weight=0.0)
    check_records([idle, RECORD])
    with pytest.raises(CollectiveMismatch, match="No rank has samples for this step"):
        check_records([idle, idle])


def test_a_record_at_its_bounds_is_read() -> None:
    """The heaviest weight, and as many intervals as there may be."""
    share = tuple((10 * place, 10 * place + 1) for place in range(MAX_PIECES))
    record = StepContribution(0, 0, HEAVIEST, 0, 0, share)
    row = record.encode().tolist()
    assert len(row) == LENGTH
    assert StepContribution.decode(row, 0) == record
    empty = StepContribution(0, 0, 0.0, 0, 0)
    assert StepContribution.decode(empty.encode().tolist(), 0) == empty


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"signature": -1},
        {"speed": -1},
        {"epoch": -1},
        {"weight": -1.0},
        {"weight": HEAVIEST * 1.01},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"share": ((5, 5),)},
        {"share": ((5, 4),)},
        {"share": ((-1, 4),)},
        {"share": ((4, 6), (0, 2))},
    ],
)
def test_a_record_out_of_bounds_is_refused(wrong: dict[str, float]) -> None:
    """And its rank is named."""
    row = replace(RECORD, **wrong).encode().tolist()  # type: ignore[arg-type]
    with pytest.raises(MalformedFrame, match="Rank 7 sent its part in a step") as found:
        StepContribution.decode(row, 7)
    assert found.value.rank == 7


@pytest.mark.parametrize("pieces", [-1, MAX_PIECES + 1])
def test_a_number_of_intervals_that_cannot_be_is_refused(pieces: int) -> None:
    """Before anything is read of them."""
    row = RECORD.encode().tolist()
    with pytest.raises(MalformedFrame, match=f"{pieces} intervals"):
        StepContribution.decode([*row[:5], pieces, *row[6:]], 0)


# --- buckets ---


def test_a_bucket_is_as_large_as_its_limit() -> None:
    """In bytes of what is averaged, from the last array to the first."""
    leaves = [leaf(name, 8) for name in "abcd"]
    assert [each.leaves for each in Buckets(leaves, limit=64).all] == [(3, 2), (1, 0)]
    assert [each.leaves for each in Buckets(leaves, limit=63).all] == [(3,), (2,), (1,), (0,)]
    assert [each.leaves for each in Buckets(leaves, limit=96).all] == [(3, 2, 1), (0,)]
    assert [each.leaves for each in Buckets(leaves).all] == [(0, 1, 2, 3)]


def test_each_precision_has_buckets_of_its_own() -> None:
    """Double precision is averaged as such, everything narrower in single precision."""
    leaves = [leaf("a", 4), leaf("b", 2, "float64"), leaf("c", 3, "float16")]
    buckets = Buckets(leaves)
    assert [(each.leaves, each.size, each.is_wide) for each in buckets.all] == [
        ((0, 2), 7, False),
        ((1,), 2, True),
    ]
    assert buckets.nbytes == 7 * 4 + 2 * 8
    assert [each.leaves for each in Buckets(leaves, limit=16).all] == [(2,), (1,), (0,)]
    assert [each.leaves for each in Buckets(leaves, limit=28).all] == [(2, 0), (1,)]
    wide = [leaf(name, 4, "float64") for name in "ab"]
    assert [each.leaves for each in Buckets(wide, limit=63).all] == [(1,), (0,)]
    assert [each.leaves for each in Buckets(wide, limit=64).all] == [(1, 0)]


def test_the_signature_tells_arrays_and_buckets_apart() -> None:
    """Names, shapes, types and the limit count, and nothing else; it is never 0."""
    leaves = [leaf("a", 6), leaf("b", 2)]
    signature = Buckets(leaves).signature
    assert signature == Buckets(leaves, room={}).signature
    others = [
        Buckets([leaf("x", 6), leaf("b", 2)]),
        Buckets([Leaf("a", (2, 3), "float32", 6), leaf("b", 2)]),
        Buckets([leaf("a", 6, "float64"), leaf("b", 2)]),
        Buckets(leaves, limit=8),
        Buckets(leaves, limit=16),
        Buckets(leaves[:1]),
    ]
    assert len({signature, *(each.signature for each in others)}) == 1 + len(others)
    assert Buckets([leaf("a", 6)]).signature == 7966090844501235789  # in every version
    assert Buckets([leaf("a", 6)], limit=16).signature == 613989734102521507
    assert all(0 < signature_of([(number,)]) < 1 << 63 for number in range(100))


def test_gradients_are_weighed_and_the_weight_stands_behind_them() -> None:
    """So one sum gives both; what has no weight counts nothing, not even what is no number."""
    tree = {"a": np.array([1.0, 2.0], np.float32), "b": np.array([[3.0]], np.float32)}
    room: Room = {}
    gradients = Gradients(tree, room)
    gradients.pack(0, 2.0)
    assert room[0].tolist() == [2.0, 4.0, 6.0, 2.0]
    assert tree["a"].tolist() == [1.0, 2.0]
    kept = room[0]
    tree["a"][0] = np.nan
    gradients.pack(0, 0.0)
    assert room[0] is kept
    assert kept.tolist() == [0.0] * 4


def test_the_mean_is_the_sum_by_its_weight() -> None:
    """In the shapes and types of the gradients; compressed sums are means already."""
    tree = [np.array([[2.0, 4.0]], np.float32), np.array([8.0], np.float16)]
    gradients = Gradients(tree)
    gradients.pack(0, 2.0)
    gradients.buckets.finish(0, is_compressed=True)
    assert [each.tolist() for each in gradients.mean()] == [[[4.0, 8.0]], [16.0]]
    gradients.buckets.finish(0, is_compressed=False)
    mean = gradients.mean()
    assert [each.tolist() for each in mean] == [[[2.0, 4.0]], [8.0]]
    assert [each.dtype for each in mean] == [np.float32, np.float16]
    wide = Gradients([np.array([6.0])])
    wide.pack(0, 0.5)
    wide.buckets.finish(0, is_compressed=True)  # double precision is never compressed
    assert wide.mean()[0].tolist() == [6.0]


def test_memory_is_used_again_where_it_fits() -> None:
    """Another size or type gets other memory, and so does a step after one that was given up."""
    room: Room = {}
    for tree in (np.ones(3, np.float32), np.ones(4, np.float32), np.ones(4)):
        gradients = Gradients([tree], room)
        gradients.pack(0, 1.0)
        assert (room[0].size, room[0].dtype) == (tree.size + 1, tree.dtype)
    kept = room[0]
    Gradients([np.ones(4)], room).pack(0, 1.0)
    assert room[0] is kept
    buckets = Buckets([leaf("0", 4, "float64")], room=room)
    buckets.forget()
    Gradients([np.ones(4)], room).pack(0, 1.0)
    assert room[0] is not kept


def test_gradients_must_be_those_that_were_announced() -> None:
    """And there must be some."""
    buckets = Buckets([leaf("0", 3)])
    with pytest.raises(ValueError, match="not the gradients whose averaging was started"):
        Gradients([np.ones(4, np.float32)], buckets=buckets)
    with pytest.raises(ValueError, match="no arrays"):
        Buckets([])


# --- what is told of it ---


@pytest.mark.parametrize(
    ("steps", "samples", "is_loaded", "words"),
    [
        (
            1,
            1,
            False,
            "1 step (1 sample) made on this machine while it was apart",
        ),
        (2, 1200, True, "2 steps (1,200 samples) that this machine loaded from a checkpoint"),
    ],
)
def test_discarded_work_is_told_in_one_sentence(
    steps: int, samples: int, is_loaded: bool, words: str
) -> None:
    """One is one, several are several."""
    before, after = Position("a" * 32, 1, 9), Position("b" * 32, 4, 8)
    lost = DiscardedWork(steps, samples, before, after, "both met", steps, samples, is_loaded)
    assert str(lost).startswith(words)
    verb = "is" if steps == 1 else "are"
    assert f" {verb} discarded: the cluster continues from step 8." in str(lost)
