"""Writing sealed frames: each has a nonce of its own, whatever becomes of what was to be sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.backend.sealed import ROOMS, SEALED_PIECE, SPARE, SealedWriter
from potluck.backend.writer import Parcel
from potluck.net.frames import HEADER_SIZE, MAX_PIECE, Header, Kind, decode, encode
from potluck.net.sealing import TAG_SIZE
from support.sealed_pair import Pair, connect, unseal
from support.valve import Owner, Valve


class Desk:
    """A writer, its stream, its keys, and every nonce it has sealed with."""

    def __init__(self) -> None:
        self.keys: Pair = connect()
        self.valve = Valve()
        self.writer = SealedWriter(self.valve, lambda _: None, self.keys.a_seals)  # type: ignore[arg-type]
        self.nonces: list[bytes] = []
        self.sent: list[tuple[Parcel, Owner]] = []
        spend = self.keys.a_seals._spend_number

        def note(size: int) -> object:
            aead, nonce = spend(size)
            self.nonces.append(nonce)
            return aead, nonce

        self.keys.a_seals._spend_number = note  # type: ignore[assignment,method-assign]

    def write(self, size: int) -> None:
        """A small frame."""
        self.writer.write(encode(Kind.EAGER, length=size), memoryview(bytes(size)))

    def send(self, size: int) -> None:
        """A large message."""
        owner = Owner()
        parcel = Parcel(owner, memoryview(bytearray(size)), group=0, tag=0)
        parcel.number = len(self.sent)
        self.sent.append((parcel, owner))
        self.writer.send(parcel)

    def recall(self, size: int) -> None:
        """Give up one of the large messages, sent or not."""
        if self.sent:
            self.writer.recall(self.sent[size % len(self.sent)][1])

    def take(self, size: int) -> None:
        """The network takes some bytes."""
        self.valve.room = size
        self.writer.flush()

    def opened(self) -> list[Header]:
        """What the other side makes of everything that was taken; it must end with a whole one."""
        place, headers = 0, []
        while place < len(self.valve.taken):
            header = decode(self.valve.taken, place, MAX_PIECE)
            start, end = place + HEADER_SIZE, place + HEADER_SIZE + header.length + TAG_SIZE
            head = bytes(self.valve.taken[place:start])
            sealed = bytes(self.valve.taken[start:end])
            assert unseal(self.keys.b_opens, sealed, head) == bytes(header.length)
            headers.append(header)
            place = end
        return headers


ACTIONS: list[Callable[[Desk, int], None]] = [Desk.write, Desk.send, Desk.recall, Desk.take]
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3 * SEALED_PIECE)), max_size=25)


@given(steps)
def test_no_nonce_comes_twice_whatever_is_aborted(
    steps: list[tuple[Callable[[Desk, int], None], int]],
) -> None:
    """What was sealed leaves, also of a send that was given up, so the two sides stay in step."""
    desk = Desk()
    for action, size in steps:
        action(desk, min(size, MAX_PIECE) if action is Desk.write else size)
    desk.take(1 << 30)
    assert len(set(desk.nonces)) == len(desk.nonces) == len(desk.opened())
    assert desk.writer.is_idle


@pytest.mark.parametrize("taken", [0, 10, HEADER_SIZE + 100, SEALED_PIECE + 1000])
def test_after_a_broken_write_nothing_is_sealed_again(taken: int) -> None:
    """A frame cut off half way is never repeated, and no other takes its number."""
    desk = Desk()
    desk.send(4 * SEALED_PIECE)
    desk.take(taken)
    spent = list(desk.nonces)
    assert len(set(spent)) == len(spent) > 0
    desk.valve.broken = True
    for _ in range(2):
        desk.take(1 << 30)
        desk.write(5)
        desk.send(1000)
    assert desk.nonces == spent
    assert len(desk.valve.taken) == taken


def test_header_and_piece_leave_in_one_buffer() -> None:
    """One call for each piece, sealed just before it leaves while it is in the cache."""
    desk = Desk()
    desk.valve.room = 1 << 30
    desk.send(3 * SEALED_PIECE)
    whole = HEADER_SIZE + SEALED_PIECE + TAG_SIZE
    assert desk.valve.calls == [[whole]] * 3


def test_small_frames_leave_together_and_before_further_pieces() -> None:
    """They do not wait for a large message, and share a call."""
    desk = Desk()
    desk.send(8 * SEALED_PIECE)
    for _ in range(3):
        desk.write(5)
    desk.take(1 << 30)
    kinds = [header.kind for header in desk.opened()]
    assert kinds == [Kind.DATA, *[Kind.EAGER] * 3, *[Kind.DATA] * 7]


def test_buffers_are_used_again_and_few_are_kept() -> None:
    """Fresh memory is slow to touch; a link that has grown once does not keep all of it."""
    desk = Desk()
    desk.valve.room = 1 << 30
    for size in (8 * SEALED_PIECE, MAX_PIECE, 40_000, 5):
        desk.send(size)
        desk.write(min(size, MAX_PIECE))
    first = {room: list(map(id, spares)) for room, spares in desk.writer._spares.items()}
    desk.send(8 * SEALED_PIECE)
    assert {room: list(map(id, spares)) for room, spares in desk.writer._spares.items()} == first
    assert all(len(desk.writer._spares[room]) <= SPARE for room in ROOMS)
