"""Messages between processes: large, many, at once, interrupted, of the wrong size."""

import contextlib
import os
import random
import signal
import sys
import threading
import time

from potluck import Backend
from support.place import Failure, Place
from support.ranks import Ranks
from support.threads import PATIENCE, eventually

LARGE = 64 << 20


def letter(rank: int, size: int = LARGE) -> bytes:
    """What a rank sends: a megabyte that nobody else would send, as often as needed."""
    block = random.Random(rank).randbytes(1 << 20)
    return (block * (size // len(block) + 1))[:size]


def receive_then_send(place: Place) -> bool:
    """Post a receive, send, and look at what came."""
    with place.join() as backend:
        (other,) = place.others
        inbox = bytearray(LARGE)
        receive = backend.post_recv_into(inbox, other)
        backend.send(letter(place.rank), other, timeout=PATIENCE)
        receive.wait(PATIENCE)
        return inbox == letter(other)


def test_both_sides_post_a_receive_and_then_send(ranks: Ranks) -> None:
    """64 MiB in both directions at once, each straight into the buffer that waits for it."""
    assert ranks.run(receive_then_send, 2) == [True, True]


def send_then_receive(place: Place) -> bool:
    """Send before anybody receives."""
    with place.join() as backend:
        (other,) = place.others
        backend.send(letter(place.rank), other, timeout=PATIENCE)
        inbox = bytearray(LARGE)
        backend.recv(inbox, other, timeout=PATIENCE)
        return inbox == letter(other)


def test_both_sides_send_first(ranks: Ranks) -> None:
    """64 MiB each way with no receive posted: plain sends that meet do not wait forever."""
    assert ranks.run(send_then_receive, 2) == [True, True]


SIZES = (0, 1, 100, 5_000, 65_536, 65_537, 300_000)
THREADS, ROUNDS = 6, 20


def exchange(backend: Backend, other: int, tag: int, problems: list[str]) -> None:
    """Send and receive messages of one tag, of sizes that both sides draw alike."""
    sizes = random.Random(tag).choices(SIZES, k=ROUNDS)
    for turn, size in enumerate(sizes):
        mine = bytes([backend.rank, tag, turn]) * size
        inbox = bytearray(3 * size)
        receive = backend.post_recv_into(inbox, other, tag=tag)
        backend.send(mine, other, tag=tag, timeout=PATIENCE)
        receive.wait(PATIENCE)
        if inbox != bytes([other, tag, turn]) * size:
            problems.append(f"message {turn} of tag {tag} from rank {other} is wrong")


def exchange_on_many_threads(place: Place) -> list[str]:
    """Several threads for every other rank; what went wrong."""
    problems: list[str] = []
    with place.join() as backend:
        threads = [
            threading.Thread(target=exchange, args=(backend, other, tag, problems))
            for other in place.others
            for tag in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            if thread.is_alive():
                problems.append(f"{thread.name} hangs")
        backend.barrier(PATIENCE)
    return problems


def test_any_number_of_threads_may_send_and_receive(ranks: Ranks) -> None:
    """Both directions of every pair at once; messages of one pair and tag keep their order."""
    assert ranks.run(exchange_on_many_threads, 3) == [[], [], []]


def everybody_to_everybody(place: Place) -> bool:
    """A message of its own size for every pair of ranks."""
    with place.join() as backend:
        sends = [
            backend.post_send(letter(place.rank, 70_001 * (place.rank + other)), other)
            for other in place.others
        ]
        right = True
        for other in reversed(place.others):
            inbox = bytearray(70_001 * (place.rank + other))
            backend.recv(inbox, other, timeout=PATIENCE)
            right &= inbox == letter(other, len(inbox))
        for send in sends:
            send.wait(PATIENCE)
        backend.barrier(PATIENCE)
        return right


def test_eight_ranks_exchange_messages_of_many_sizes(ranks: Ranks) -> None:
    """56 messages at once, received in another order than they were sent."""
    assert ranks.run(everybody_to_everybody, 8) == [True] * 8


def receive_impatiently(place: Place) -> list[int]:
    """Rank 1 gives up every two milliseconds until it has the message; how often it did."""
    expected, inbox, after = letter(0), bytearray(LARGE), bytearray(4)
    with place.join() as backend:
        if place.rank == 0:
            backend.send(expected, 1, timeout=PATIENCE)
            backend.send(b"next", 1, timeout=PATIENCE)
            backend.barrier(PATIENCE)
            return []
        expired = 0
        has_arrived = False
        while not has_arrived:
            try:
                backend.recv_timeout(inbox, 0, 0.002)
                has_arrived = True
            except TimeoutError:
                expired += 1
        assert inbox == expected
        backend.recv_timeout(after, 0, PATIENCE)
        backend.barrier(PATIENCE)
        return [expired, after == b"next"]


def test_a_receive_that_gives_up_in_the_middle_loses_nothing(ranks: Ranks) -> None:
    """64 MiB take longer than two milliseconds; the receive that comes last has them whole."""
    _, (expired, next_is_right) = ranks.run(receive_impatiently, 2)
    assert expired >= 2  # the first of them asked for the message, a later one met it half-way
    assert next_is_right


def receive_wrong_sizes(place: Place, sizes: list[list[int]]) -> list[Failure]:
    """Rank 1 expects other sizes than rank 0 sends, and then a right one."""
    with place.join() as backend:
        failures = []
        for sent, expected in sizes:
            if place.rank == 0:
                backend.send(bytes(sent), 1, timeout=PATIENCE)
                backend.send(b"next", 1, timeout=PATIENCE)
            else:
                failures.append(place.failure_of(backend.recv, bytearray(expected), 0))
                inbox = bytearray(4)
                backend.recv(inbox, 0, timeout=PATIENCE)
                assert inbox == b"next"
        backend.barrier(PATIENCE)
        return failures


def test_a_message_of_another_size_keeps_the_stream_in_step(ranks: Ranks) -> None:
    """Both sizes are reported, for small and for large messages, and the next one is right."""
    sizes = [[10, 4], [4, 10], [0, 1], [1, 0], [5 << 20, 1], [1, 5 << 20], [5 << 20, 6 << 20]]
    _, failures = ranks.run(receive_wrong_sizes, 2, sizes)
    assert [failure["kind"] for failure in failures] == ["SizeMismatch"] * len(sizes)
    assert [[failure["got"], failure["expected"]] for failure in failures] == sizes
    assert {failure["rank"] for failure in failures} == {0}


def write_past_a_stopped_rank(place: Place) -> float:
    """Ranks 0 and 1 go on with each other while rank 2 is stopped with letters under way to it."""
    with place.join() as backend:
        taken = 0.0
        if place.rank == 2:
            place.say("ready")
            place.hear("go")
            inbox = bytearray(8 << 20)
            for sender in (0, 1):
                backend.recv(inbox, sender, timeout=PATIENCE)
                assert inbox == letter(sender, len(inbox))
        else:
            place.hear("go")
            to_stopped = backend.post_send(letter(place.rank, 8 << 20), 2)
            before = time.monotonic()
            exchange(backend, 1 - place.rank, 0, [])
            taken = time.monotonic() - before
            place.say("done")
            to_stopped.wait(PATIENCE)
        backend.barrier(PATIENCE)
        return taken


def test_a_stopped_rank_holds_up_nobody_else(ranks: Ranks) -> None:
    """A process in the debugger, or a laptop asleep: the others talk on, and it misses nothing."""
    zero, one, two = ranks.start(write_past_a_stopped_rank, 3)
    two.expect("ready")
    two.send_signal(signal.SIGSTOP)
    for process in (zero, one):
        process.tell("go")
    for process in (zero, one):
        process.expect("done", timeout=20)
    two.send_signal(signal.SIGCONT)
    two.tell("go")
    for process in (zero, one, two):
        process.value()


class Interrupted(Exception):
    """What a signal handler of the user's raises; Ctrl-C is of this kind."""


def interrupt(signum: int, frame: object) -> None:
    """Raise from wherever the main thread is."""
    raise Interrupted


def interrupt_main_thread_inside(function: str) -> None:
    """Wait until the main thread is in a call of ``function``, and interrupt it there."""

    def is_inside() -> bool:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if frame.f_code.co_name == function:
                return True
            frame = frame.f_back
        return False

    eventually(is_inside)
    os.kill(os.getpid(), signal.SIGUSR1)


def receive_again_after_an_interrupt(place: Place) -> list[bool]:
    """Rank 1 is interrupted while it waits, and then waits again."""
    with place.join() as backend:
        right = []
        for size in (100, 5 << 20):
            if place.rank == 0:
                backend.recv(bytearray(1), 1, timeout=PATIENCE)  # until then, say nothing
                backend.send(letter(0, size), 1, timeout=PATIENCE)
                continue
            signal.signal(signal.SIGUSR1, interrupt)
            threading.Thread(target=interrupt_main_thread_inside, args=["_pump"]).start()
            with contextlib.suppress(Interrupted):
                backend.recv(bytearray(size), 0, timeout=PATIENCE)
            backend.send(b"!", 0, timeout=PATIENCE)
            inbox = bytearray(size)
            backend.recv(inbox, 0, timeout=5)
            right.append(inbox == letter(0, size))
        backend.barrier(PATIENCE)
        return right


def test_a_receive_that_is_interrupted_takes_no_message(ranks: Ranks) -> None:
    """Somebody presses Ctrl-C in a notebook and runs the cell again: nothing has got lost."""
    assert ranks.run(receive_again_after_an_interrupt, 2)[1] == [True, True]
