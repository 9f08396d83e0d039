"""Who does not fit is told why, in a sentence, and nobody else is disturbed."""

import socket

from support.place import Place
from support.ranks import Rank, Ranks, new_master
from support.threads import PATIENCE, eventually


def meet(place: Place) -> int:
    """Take part in a group that forms; how many ranks it has."""
    with place.join() as backend:
        backend.barrier(PATIENCE)
        return backend.world_size


def announce_and_meet(place: Place) -> int:
    """The same, saying when this process is about to dial."""
    place.say("here")
    return meet(place)


def test_a_second_process_with_the_same_rank_is_refused(ranks: Ranks) -> None:
    """The first one keeps its place, and the group forms around it."""
    master = new_master()
    zero, one = ranks.start(announce_and_meet, 3, ranks=[0, 1], master=master)
    zero.expect("here")
    one.expect("here")
    offenders = ranks.start(meet, 3, ranks=[1, 1], master=master)
    waiting = [one, *offenders]  # any of the three may have come first; two are refused
    eventually(lambda: sum(map(Rank.has_news, waiting)) == 2)
    for process in filter(Rank.has_news, waiting):
        failure = process.failure()
        assert failure["kind"] == "HandshakeRefused"
        assert "rank 1 is already here" in failure["text"]
        assert socket.gethostname() in failure["text"]
    holders = [process for process in waiting if not process.is_idle]
    (two,) = ranks.start(meet, 3, ranks=[2], master=master)
    assert [process.value() for process in (zero, two, *holders)] == [3, 3, 3]


def test_a_process_started_for_another_world_size_is_refused(ranks: Ranks) -> None:
    """It is told both sizes; the others go on waiting for the right one."""
    master = new_master()
    started = ranks.start(meet, 3, ranks=[0, 1], master=master)
    (offender,) = ranks.start(meet, 5, ranks=[2], master=master)
    failure = offender.failure()
    assert failure["kind"] == "HandshakeRefused"
    assert "group of 5" in failure["text"]
    assert "group of 3" in failure["text"]
    started += ranks.start(meet, 3, ranks=[2], master=master)
    assert [process.value() for process in started] == [3, 3, 3]
