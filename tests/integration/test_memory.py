"""What a rank does not take in stays with its sender: nobody's memory grows without bound."""

from potluck.backend.messages import MessageLimits
from support.place import Place, resident
from support.ranks import Ranks
from support.threads import PATIENCE

MIB = 1 << 20
SLACK = 24 * MIB  # what an interpreter's own heap may do meanwhile


def pour(place: Place, size: int, count: int) -> int:
    """Rank 0 sends without end, rank 1 looks after other things; how much each has grown."""
    message = bytes(size)
    with place.join() as backend:
        backend.barrier(PATIENCE)
        before = resident()
        if place.rank == 0:
            sends = [backend.post_send(message, 1, tag=7) for _ in range(count)]
            backend.send(b"sent", 1, timeout=PATIENCE)  # another tag, so it overtakes
            grown = resident() - before
            backend.barrier(PATIENCE)
            for send in sends:
                send.wait(PATIENCE)
        else:
            backend.recv(bytearray(4), 0, timeout=PATIENCE)
            grown = resident() - before
            backend.barrier(PATIENCE)
            inbox = bytearray(size)
            for _ in range(count):
                backend.recv(inbox, 0, tag=7, timeout=PATIENCE)
            grown = max(grown, resident() - before - size)
        backend.barrier(PATIENCE)
        return grown


def test_small_messages_that_nobody_receives_stay_bounded(ranks: Ranks) -> None:
    """96 MiB in messages below the eager size: within the credit they travel, the rest wait."""
    sender, receiver = ranks.run(pour, 2, 64 << 10, 1536)
    assert sender < SLACK
    assert receiver < MessageLimits().credit + SLACK


def test_large_messages_that_nobody_receives_stay_with_their_sender(ranks: Ranks) -> None:
    """256 MiB are offered; not one byte of them travels before it is asked for."""
    sender, receiver = ranks.run(pour, 2, 8 * MIB, 32)
    assert sender < SLACK
    assert receiver < SLACK


def help_while_sending(place: Place, size: int, count: int) -> int:
    """Rank 0 is stuck in a send to rank 2 while rank 1 offers it more than it may take in."""
    with place.join() as backend:
        backend.barrier(PATIENCE)
        before = resident()
        if place.rank == 0:
            backend.send(bytes(size), 2, timeout=PATIENCE)
        elif place.rank == 1:
            message = bytes(size)
            sends = [backend.post_send(message, 0) for _ in range(count)]
            # Only within the budget can some of them be finished before rank 0 receives.
            for send in sends[:4]:
                send.wait(PATIENCE)
            backend.send(b"full", 2, timeout=PATIENCE)
        else:
            backend.recv(bytearray(4), 1, timeout=PATIENCE)
            backend.recv(bytearray(size), 0, timeout=PATIENCE)
        grown = resident() - before
        if place.rank == 0:
            inbox = bytearray(size)
            for _ in range(count):
                backend.recv(inbox, 1, timeout=PATIENCE)
        backend.barrier(PATIENCE)
        return grown


def test_helping_others_to_get_on_has_a_budget(ranks: Ranks) -> None:
    """A rank that waits in a send takes in what is offered to it, but not more than the budget."""
    helper, _, _ = ranks.run(help_while_sending, 3, 16 * MIB, 20)
    assert helper < MessageLimits().courtesy + SLACK
