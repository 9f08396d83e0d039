"""A rank that leaves: what it sent before still arrives, and what it was doing ends."""

import signal
import threading
import time

from potluck import Backend
from support.place import Failure, Place
from support.ranks import Ranks
from support.threads import PATIENCE


def send_and_leave(place: Place, count: int, size: int, way: str) -> list[str]:
    """Rank 0 sends and leaves at once; rank 1 looks only when rank 0 is gone."""
    backend = place.join()
    if place.rank == 0:
        for number in range(count):
            backend.send(number.to_bytes(4, "little") * (size // 4), 1, timeout=PATIENCE)
        place.say("left")
        if way == "exit":
            raise SystemExit
        backend.close()
        return []
    place.hear("look")
    inbox = bytearray(size)
    for number in range(count):
        backend.recv(inbox, 0, timeout=PATIENCE)
        assert inbox == number.to_bytes(4, "little") * (size // 4)
    after = place.failure_of(backend.recv, inbox, 0, timeout=PATIENCE)
    backend.close()
    return [after["kind"], after["text"]]


def test_what_was_sent_before_leaving_arrives(ranks: Ranks) -> None:
    """Many messages wait in the system's buffers when it closes, or when its script just ends."""
    for way, count, size in (("close", 200, 4096), ("close", 15, 65_536), ("exit", 1000, 400)):
        zero, one = ranks.start(send_and_leave, 2, count, size, way)
        zero.expect("left")
        if way == "close":
            zero.value()
        else:
            assert zero.exit_code() == 0
        one.tell("look")
        kind, text = one.value()
        assert kind == "PeerLost"
        assert "it closed its backend" in text


def leave_with_both_sides_writing(place: Place) -> int:
    """Both send all the time; rank 0 leaves with rank 1's messages unread in its socket."""
    backend = place.join()
    if place.rank == 0:
        for number in range(100):
            backend.send(number.to_bytes(4, "little") * 500, 1, timeout=PATIENCE)
        backend.close()
        return 0
    for _ in range(100):
        backend.send(bytes(2000), 0, timeout=PATIENCE)
    inbox = bytearray(2000)
    received = 0
    try:
        while True:
            backend.recv(inbox, 0, timeout=PATIENCE)
            assert inbox == received.to_bytes(4, "little") * 500
            received += 1
    except ConnectionError:
        return received
    finally:
        backend.close()


def test_unread_messages_do_not_destroy_the_ones_under_way(ranks: Ranks) -> None:
    """A socket closed with unread bytes resets the connection, which throws away what it sent."""
    for _ in range(10):
        assert ranks.run(leave_with_both_sides_writing, 2) == [0, 100]


def close_under_waiting_threads(place: Place) -> list[Failure]:
    """Close while threads of ours wait in every kind of call."""
    failures: list[Failure] = []
    with place.join() as backend:
        backend.barrier(PATIENCE)
        if place.rank == 1:
            place.hear("leave")
            return []
        waits = [
            lambda: backend.recv(bytearray(4), 1, timeout=PATIENCE),
            lambda: backend.send(bytes(8 << 20), 1, timeout=PATIENCE),
            lambda: backend.barrier(PATIENCE),
        ]
        threads = [
            threading.Thread(target=lambda wait=wait: failures.append(place.failure_of(wait)))
            for wait in waits
        ]
        for thread in threads:
            thread.start()
        place.say("waiting")
        place.hear("close")
        backend.close()
        for thread in threads:
            thread.join(PATIENCE)
    failures.append(place.failure_of(backend.send, b"", 1))
    return failures


def test_closing_wakes_the_threads_of_this_process_too(ranks: Ranks) -> None:
    """Nobody waits for a backend that is closed, and nobody can use it any more."""
    zero, one = ranks.start(close_under_waiting_threads, 2)
    zero.expect("waiting")
    zero.tell("close")
    assert [failure["kind"] for failure in zero.value()] == ["ChannelClosed"] * 4
    one.tell("leave")
    one.value()


def exit_with_a_waiting_thread(place: Place) -> Failure | None:
    """Rank 0's script ends while a background thread of it waits for a message."""
    backend = place.join()
    backend.barrier(PATIENCE)
    if place.rank == 1:
        with backend:
            return place.failure_of(backend.recv, bytearray(4), 0, timeout=PATIENCE)
    threading.Thread(target=wait_for_nothing, args=(backend,), daemon=True).start()
    raise SystemExit


def wait_for_nothing(backend: Backend) -> None:
    """Receive what nobody sends."""
    backend.recv(bytearray(4), 1, timeout=PATIENCE)


def test_a_script_may_end_while_a_background_thread_waits(ranks: Ranks) -> None:
    """It does not hang at its end, and its peers are told."""
    zero, one = ranks.start(exit_with_a_waiting_thread, 2)
    assert zero.exit_code() == 0
    failure = one.value()
    assert failure["kind"] == "PeerLost"
    assert "it closed its backend" in failure["text"]


def leave_a_stopped_peer(place: Place) -> float:
    """Close while the peer reads nothing and the connection is full; how long that took."""
    backend = place.join()
    backend.barrier(PATIENCE)
    if place.rank == 1:
        place.say("ready")
        place.hear("leave")
        backend.close()
        return 0.0
    place.hear("fill")
    for _ in range(200):
        backend.post_send(bytes(60_000), 1)
    begin = time.monotonic()
    backend.close()
    return time.monotonic() - begin


def test_leaving_does_not_wait_long_for_one_who_does_not_listen(ranks: Ranks) -> None:
    """What was sent gets a second to arrive, no more."""
    zero, one = ranks.start(leave_a_stopped_peer, 2)
    one.expect("ready")
    one.send_signal(signal.SIGSTOP)
    zero.tell("fill")
    assert zero.value() < 5
    one.send_signal(signal.SIGCONT)
    one.tell("leave")
    one.value()
