"""A rank ends, in whatever way: everybody who waits for it learns so at once, and which it was."""

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import cast

from potluck import Backend
from support.place import Failure, Place
from support.ranks import Ranks
from support.threads import PATIENCE

TRIALS = 5
AT_ONCE = 0.1  # seconds from the end of a rank until its peers know, on one machine
AT_LATEST = 5.0  # the same for the worst of all trials: other work shares these cores

VICTIM = 2
WAITS = {0: "recv", 1: "barrier", 3: "send"}


def close(backend: Backend) -> None:
    """Leave like a well-behaved program."""
    backend.close()


def exit_without_closing(backend: Backend) -> None:
    """Leave like a script that comes to its end."""
    sys.exit(3)


def exit_at_once(backend: Backend) -> None:
    """Leave like a program that some library ends."""
    os._exit(4)


def wait_to_be_killed(backend: Backend) -> None:
    """Do nothing until somebody does it."""
    time.sleep(PATIENCE)


def leave_children_behind(backend: Backend) -> None:
    """Have children that were forked, as data loaders are, and that outlive their parent."""
    context = multiprocessing.get_context("fork")
    context.Process(target=time.sleep, args=(PATIENCE,)).start()
    if os.fork() == 0:
        time.sleep(PATIENCE)
        os._exit(0)
    time.sleep(PATIENCE)


WAYS: dict[str, Callable[[Backend], None]] = {
    way.__name__: way
    for way in (
        close,
        exit_without_closing,
        exit_at_once,
        wait_to_be_killed,
        leave_children_behind,
    )
}
KILLED = {"wait_to_be_killed", "leave_children_behind"}
ENDED = WAYS.keys() - {"close"}


def lose_rank_2(place: Place, way: str, wait: str) -> None:
    """Rank 2 ends in a certain way while the others wait for it in certain calls."""
    backend = place.join()
    calls: dict[str, Callable[[], None]] = {
        "recv": lambda: backend.recv(bytearray(10), VICTIM, timeout=PATIENCE),
        "send": lambda: backend.send(bytes(8 << 20), VICTIM, timeout=PATIENCE),
        "barrier": lambda: backend.barrier(PATIENCE),
    }
    backend.barrier(PATIENCE)
    if place.rank == VICTIM:
        place.hear("end")
        place.say("ending")
        WAYS[way](backend)
        return
    place.say("waiting")
    failure = place.failure_of(calls[WAITS[place.rank] if wait == "mixed" else wait])
    place.say("lost", **failure)
    place.hear("leave")  # or others would lose this rank, too
    backend.close()


def end_rank_2(ranks: Ranks, way: str, wait: str) -> tuple[float, list[Failure]]:
    """The moment of its end, and how its peers learnt of it."""
    processes = ranks.start(lose_rank_2, 4, way, wait)
    others = [process for process in processes if process.rank != VICTIM]
    for process in others:
        process.expect("waiting")
    victim = processes[VICTIM]
    victim.tell("end")
    moment = float(victim.expect("ending")["at"])
    if way in KILLED:
        moment = victim.kill()
    failures = [cast("Failure", process.expect("lost")) for process in others]
    for process in others:
        process.tell("leave")
    for process in others if way in ENDED else processes:
        process.value()
    return moment, failures


def crowding() -> float:
    """How many times longer everything takes because other work shares these cores; 1 if none."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def assert_everybody_learns_of_it(ranks: Ranks, way: str, wait: str = "mixed") -> None:
    """In a receive, in a send and in a barrier; the rank is named, and it does not take long."""
    delays: list[list[float]] = []
    for _ in range(TRIALS):
        moment, failures = end_rank_2(ranks, way, wait)
        for failure in failures:
            assert failure["kind"] == "PeerLost"
            assert failure["rank"] == VICTIM
            assert f"Rank {VICTIM} " in failure["text"]
        delays.append([failure["at"] - moment for failure in failures])
    for of_one_rank in zip(*delays, strict=True):
        assert statistics.median(of_one_rank) <= AT_ONCE * crowding()
        assert max(of_one_rank) <= AT_LATEST


def test_a_rank_that_closes_wakes_everybody_who_waits_for_it(ranks: Ranks) -> None:
    """A message that it will never send, one that it will never take, a barrier it left."""
    assert_everybody_learns_of_it(ranks, "close")


def test_a_rank_whose_script_ends_wakes_everybody_who_waits_for_it(ranks: Ranks) -> None:
    """It need not have closed its backend."""
    assert_everybody_learns_of_it(ranks, "exit_without_closing")


def test_a_rank_that_exits_on_the_spot_wakes_everybody_who_waits_for_it(ranks: Ranks) -> None:
    """Without a chance to say goodbye."""
    assert_everybody_learns_of_it(ranks, "exit_at_once")


def test_a_killed_rank_wakes_everybody_who_waits_for_it(ranks: Ranks) -> None:
    """The kernel ends its connections."""
    assert_everybody_learns_of_it(ranks, "wait_to_be_killed")


def test_the_children_of_a_killed_rank_do_not_keep_it_alive(ranks: Ranks) -> None:
    """They were forked with its connections open, and they live on."""
    assert_everybody_learns_of_it(ranks, "leave_children_behind")


def test_a_barrier_without_one_of_its_ranks_fails_on_all_alike(ranks: Ranks) -> None:
    """Also on those that were not waiting for the lost one's own word."""
    assert_everybody_learns_of_it(ranks, "close", wait="barrier")
    assert_everybody_learns_of_it(ranks, "wait_to_be_killed", wait="barrier")


def test_the_error_says_how_the_rank_ended(ranks: Ranks) -> None:
    """A rank that left and one that crashed are different news."""
    _, left = end_rank_2(ranks, "exit_without_closing", "recv")
    assert all("it closed its backend" in failure["text"] for failure in left)
    _, crashed = end_rank_2(ranks, "wait_to_be_killed", "recv")
    assert all("its process ended" in failure["text"] for failure in crashed)


def go_on_without(place: Place) -> list[str]:
    """When rank 2 is gone, the others still have each other."""
    with place.join() as backend:
        if place.rank == VICTIM:
            place.say("ready")
            time.sleep(PATIENCE)
        failures = [place.failure_of(backend.recv, bytearray(1), VICTIM, timeout=PATIENCE)]
        failures.append(place.failure_of(backend.send, b"anybody there?", VICTIM))
        failures.append(place.failure_of(backend.recv, bytearray(1), VICTIM, timeout=PATIENCE))
        inbox = bytearray(3 << 20)
        for other in place.others:
            if other != VICTIM:
                receive = backend.post_recv_into(inbox, other)
                backend.send(bytes([place.rank]) * len(inbox), other, timeout=PATIENCE)
                receive.wait(PATIENCE)
                assert inbox == bytes([other]) * len(inbox)
        return [failure["kind"] for failure in failures]


def test_the_others_go_on_without_it(ranks: Ranks) -> None:
    """Whatever is asked of the lost rank fails at once; all other pairs work as before."""
    processes = ranks.start(go_on_without, 4)
    processes[VICTIM].expect("ready")
    processes[VICTIM].kill()
    for process in processes:
        if process.rank != VICTIM:
            assert process.value() == ["PeerLost"] * 3
