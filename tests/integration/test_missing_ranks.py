"""A group that does not come together says who is missing, to everyone who is there."""

import re

from support.place import Failure, Place
from support.ports import free_port
from support.ranks import Rank, Ranks, new_master, start_together
from support.threads import PATIENCE, eventually

SHORT = 1.0  # seconds


def wait_in_vain(place: Place, timeout: float = SHORT) -> Failure:
    """Try to join a group that will not form; how that ended."""
    place.wait_for_start()
    return place.failure_of(place.join, timeout=timeout)


def test_everyone_who_waits_is_told_who_is_missing(ranks: Ranks) -> None:
    """Not only rank 0 knows: each process's own output names ranks 2 and 4 (of 5)."""
    started = ranks.start(wait_in_vain, 5, ranks=[3, 1, 0])
    start_together(started)
    for process in started:
        # On a busy machine one of the others may have given up just before.
        assert re.search(r"ranks (1, )?2, (3, )?4", process.value()["text"])


def test_whoever_runs_out_of_time_first_is_told_too(ranks: Ranks) -> None:
    """Rank 0 came later and would wait longer; rank 1's time is up before that."""
    master = new_master()
    (one,) = ranks.start(wait_in_vain, 3, SHORT, ranks=[1], master=master)
    (zero,) = ranks.start(wait_in_vain, 3, 3 * SHORT, ranks=[0], master=master)
    start_together([one, zero])
    assert "rank 2" in one.value()["text"]
    # Rank 1 has given up, so it is missing as well by the time rank 0 does.
    assert "ranks 1, 2" in zero.value()["text"]


def test_a_missing_rank_0_is_named_with_its_address(ranks: Ranks) -> None:
    """The others say where they looked for it, and what happened there."""
    master = new_master()
    (one,) = ranks.start(wait_in_vain, 2, SHORT, ranks=[1], master=master)
    start_together([one])
    failure = one.value()
    assert failure["kind"] == "Timeout"
    assert failure["missing"] == [0]
    assert master in failure["text"]
    assert "Connection refused" in failure["text"]


def test_a_host_name_that_nobody_knows_is_named(ranks: Ranks) -> None:
    """A typing error in the master's name shows as what it is."""
    (one,) = ranks.start(
        wait_in_vain, 2, SHORT, ranks=[1], master=f"no-such-host.invalid:{free_port()}"
    )
    start_together([one])
    failure = one.value()
    assert failure["kind"] == "Timeout"
    assert "no-such-host.invalid" in failure["text"]


def meet(place: Place) -> int:
    """Take part in a group that forms."""
    place.say("here")
    with place.join() as backend:
        backend.barrier(PATIENCE)
        return backend.world_size


def start_joined(ranks: Ranks, master: str) -> Rank:
    """A rank 1 that is known to have joined: another one has been refused because of it."""
    both = ranks.start(meet, 3, ranks=[1, 1], master=master)
    for process in both:
        process.expect("here")
    eventually(lambda: any(map(Rank.has_news, both)))
    both.sort(key=Rank.has_news)
    assert "already here" in both[1].failure()["text"]
    return both[0]


def finish(processes: list[Rank]) -> list[int]:
    """What these ranks return, whose programs have not been looked at yet."""
    for process in processes:
        process.expect("here")
    return [process.value() for process in processes]


def test_a_rank_that_dies_while_it_waits_may_come_again(ranks: Ranks) -> None:
    """Its place is free as soon as its process is gone."""
    master = new_master()
    started = ranks.start(meet, 3, ranks=[0], master=master)
    victim = start_joined(ranks, master)
    victim.kill()
    victim.exit_code()
    started += ranks.start(meet, 3, ranks=[1, 2], master=master)
    assert finish(started) == [3, 3, 3]


def test_rank_0_may_die_while_the_others_wait_and_come_again(ranks: Ranks) -> None:
    """They dial on until it is back."""
    master = new_master()
    (victim,) = ranks.start(meet, 3, ranks=[0], master=master)
    one = start_joined(ranks, master)
    victim.kill()
    victim.exit_code()
    started = ranks.start(meet, 3, ranks=[0, 2], master=master)
    assert [*finish(started), one.value()] == [3, 3, 3]
