"""Notices: short words between ranks, beside everything else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck import SimulatedBackend
from potluck.runtime.notices import SIZE, Notice, Notices, Word
from support.threads import eventually


@given(
    st.builds(
        Notice,
        st.sampled_from(Word),
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
    packed = Notice(Word.FAILED, 1, 2, text=text).pack()
    assert len(packed) == SIZE
    found = Notice.unpack(packed)
    assert found is not None
    assert text.startswith(found.text.rstrip("\ufffd"))


@given(st.binary(min_size=SIZE, max_size=SIZE))
def test_any_bytes_are_a_notice_or_nothing(data: bytes) -> None:
    """Whatever a peer sends."""
    notice = Notice.unpack(data)
    assert notice is None or isinstance(notice.word, Word)


def test_notices_reach_those_they_are_for() -> None:
    """All of them, in order, and nobody else."""
    backends = SimulatedBackend.create_group(3)
    boards = [Notices(backend) for backend in backends]
    sent = [Notice(Word.WAITING, 0, number) for number in range(5)]
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
    board.tell([1, 2], Notice(Word.ABORTED, 0, 1, text="enough"))
    got: list[tuple[int, Notice]] = []

    def collect() -> bool:
        got.extend(other.collect())
        return bool(got)

    eventually(collect)
    assert got[0][1].text == "enough"
    board.tell([1], Notice(Word.ABORTED, 0, 2))
    assert board.collect() == []
    for each in (left, middle, right):
        each.close()
