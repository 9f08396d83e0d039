"""Fingerprints: they tell operations apart, and say in words how they differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import SimulatedBackend
from potluck.collective.call import Call, Purpose
from potluck.collective.fingerprint import (
    NOTICE_SIZE,
    SIZE,
    Fingerprint,
    Notice,
    NoticeKind,
    Notices,
    describe_mismatch,
)
from potluck.schedule.reduce import BFLOAT16, DTYPES, Dtype, ReduceOp, Reducer
from potluck.schedule.task import Collective, Task
from support.threads import eventually


def fingerprint(
    task: Task, dtype: object = "f4", op: ReduceOp | None = None, plan: int = 1
) -> Fingerprint:
    """The fingerprint of a call on such arrays."""
    array = np.zeros(0, dtype)  # type: ignore[call-overload]
    reducer = None if op is None else Reducer.of(op, array.dtype)
    return Fingerprint.of(Call(task, array, array, reducer), plan)


SUM = fingerprint(Task.whole(Collective.ALL_REDUCE, 4, 10), op=ReduceOp.SUM)

OTHERS = {
    "collective": fingerprint(Task.whole(Collective.BROADCAST, 4, 10)),
    "reduction": fingerprint(Task.whole(Collective.ALL_REDUCE, 4, 10), op=ReduceOp.MAX),
    "type": fingerprint(Task.whole(Collective.ALL_REDUCE, 4, 10), "f8", ReduceOp.SUM),
    "count": fingerprint(Task.whole(Collective.ALL_REDUCE, 4, 11), op=ReduceOp.SUM),
    "plan": fingerprint(Task.whole(Collective.ALL_REDUCE, 4, 10), op=ReduceOp.SUM, plan=2),
    "purpose": SUM._replace(purpose=1),
}


@pytest.mark.parametrize("what", OTHERS)
def test_every_difference_shows(what: str) -> None:
    """In the bytes, and in the words that name both sides."""
    other = OTHERS[what]
    assert other.pack() != SUM.pack()
    words = describe_mismatch((0, SUM), (3, other), lambda rank: f"host{rank}")
    assert words.startswith("rank 0 called all_reduce(sum, float32, 10 elements), rank 3 (host3)")
    assert str(other) in words


def test_roots_and_blocks_are_told_apart() -> None:
    """Who the root is, and how the elements are divided."""
    first = fingerprint(Task.whole(Collective.BROADCAST, 4, 10, root=1))
    second = fingerprint(Task.whole(Collective.BROADCAST, 4, 10, root=2))
    assert first != second
    assert str(second) == "broadcast(float32, 10 elements, root 2)"
    first = fingerprint(Task.blocks(Collective.ALL_GATHER, (4, 6)))
    second = fingerprint(Task.blocks(Collective.ALL_GATHER, (6, 4)))
    assert first != second
    assert "divided differently" in describe_mismatch((0, first), (1, second), str)


def test_calls_are_named_as_they_were_written() -> None:
    """Not by what they are made of; one is not many."""
    barrier = fingerprint(Task.whole(Collective.BARRIER, 4, 1), "u1", ReduceOp.BIT_OR)
    assert str(barrier) == "barrier()"
    lengths = fingerprint(Task.whole(Collective.BROADCAST, 4, 1, root=2), "i8")
    assert str(lengths) == "broadcast(int64, 1 element, root 2)"
    told = lengths._replace(purpose=Purpose.BROADCAST_OBJECT)
    assert str(told) == "broadcast_object"
    moved = told._replace(elements=700)
    words = describe_mismatch((0, told), (1, moved), str)
    parts = (
        "broadcast(int64, 1 element, root 2), the other at broadcast(int64, 700 elements, root 2)"
    )
    assert words.endswith(f"called broadcast_object; one is at its part {parts}")
    other = told._replace(root=1)
    assert describe_mismatch((0, told), (1, other), str).endswith(", with roots 2 and 1")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_named(dtype: Dtype) -> None:
    """As its users call it."""
    name = "bfloat16" if dtype == BFLOAT16 else dtype.name
    assert name in str(fingerprint(Task.whole(Collective.BROADCAST, 2, 3), dtype))


def test_other_types_can_be_moved_too() -> None:
    """Times, for example; the words say what they are, or at least that they differ."""
    task = Task.whole(Collective.BROADCAST, 2, 3)
    first, second, third = (fingerprint(task, each) for each in ("M8[s]", "M8[ms]", "U3"))
    assert len({first, second, third}) == 3
    assert "datetime64 of 8 bytes" in str(first)
    assert "text of 12 bytes" in describe_mismatch((0, first), (1, third), str)
    assert "differ in their parts or units" in describe_mismatch((0, first), (1, second), str)


@given(st.binary(min_size=SIZE, max_size=SIZE))
def test_any_bytes_can_be_put_into_words(data: bytes) -> None:
    """Whatever a peer sends, nothing fails on the way to the error."""
    assert str(Fingerprint.unpack(data))


@given(
    st.builds(
        Fingerprint,
        *[st.integers(0, 255)] * 4,
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
        *[st.integers(0, 2**32 - 1)] * 4,
    )
)
def test_they_survive_the_journey(one: Fingerprint) -> None:
    """Packed and unpacked they are the same."""
    assert len(one.pack()) == SIZE
    assert Fingerprint.unpack(one.pack()) == one


# --------------------------------------------------------------------------------------------------
# Notices: short words between ranks, beside everything else.


@given(
    st.builds(
        Notice,
        st.sampled_from(NoticeKind),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**64 - 1),
        st.integers(-1, 2**31 - 1),
        st.binary(min_size=32, max_size=32),
        st.text(st.characters().filter(str.isprintable), max_size=60),
        st.integers(0, 2**64 - 1),
        st.binary(min_size=32, max_size=32),
    )
)
def test_a_notice_survives_the_journey(notice: Notice) -> None:
    """Packed and unpacked it is the same."""
    assert Notice.unpack(notice.pack()) == notice


@given(st.text(st.characters().filter(str.isprintable), min_size=1000))
def test_long_words_lose_their_end(text: str) -> None:
    """A notice has one size."""
    packed = Notice(NoticeKind.FAILED, 1, 2, text=text).pack()
    assert len(packed) == NOTICE_SIZE
    found = Notice.unpack(packed)
    assert found is not None
    assert text.startswith(found.text.rstrip("\ufffd"))


@given(st.binary(min_size=NOTICE_SIZE, max_size=NOTICE_SIZE))
def test_any_bytes_are_a_notice_or_nothing(data: bytes) -> None:
    """Whatever a peer sends."""
    notice = Notice.unpack(data)
    assert notice is None or isinstance(notice.word, NoticeKind)


def test_notices_reach_those_they_are_for() -> None:
    """All of them, in order, and nobody else."""
    backends = SimulatedBackend.create_group(3)
    boards = [Notices(backend) for backend in backends]
    sent = [Notice(NoticeKind.WAITING, 0, number) for number in range(5)]
    for notice in sent:
        boards[0].tell([2], notice)
    got: list[tuple[int, Notice]] = []

    def collect() -> bool:
        got.extend(boards[2].collect())
        return len(got) == len(sent)

    eventually(collect)
    assert got == [(0, notice) for notice in sent]
    assert boards[1].collect() == []
    for board, backend in zip(boards, backends, strict=True):
        board.close()
        backend.close()


def test_those_who_are_gone_are_left_out() -> None:
    """Telling and collecting go on without them."""
    left, middle, right = SimulatedBackend.create_group(3)
    board, other = Notices(left), Notices(right)
    middle.lose()
    board.tell([1, 2], Notice(NoticeKind.ABORTED, 0, 1, text="enough"))
    got: list[tuple[int, Notice]] = []

    def collect() -> bool:
        got.extend(other.collect())
        return bool(got)

    eventually(collect)
    assert got[0][1].text == "enough"
    board.tell([1], Notice(NoticeKind.ABORTED, 0, 2))
    assert board.collect() == []
    for each in (left, middle, right):
        each.close()
