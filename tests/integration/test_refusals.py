"""Who does not fit is told why, in a sentence, and nobody else is disturbed."""

import contextlib
import socket

from potluck.net import frames
from support.place import Place
from support.ports import free_port
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


def speak_another_version(place: Place) -> int:
    """Take part like a later release that has changed the protocol."""
    ours = frames.PROTOCOL_VERSION
    frames.PROTOCOL_VERSION = 77
    try:
        return meet(place)
    finally:
        frames.PROTOCOL_VERSION = ours


def test_a_process_that_speaks_another_protocol_version_is_refused(ranks: Ranks) -> None:
    """Both versions are named, and what to do about it."""
    master = new_master()
    started = ranks.start(meet, 3, ranks=[0, 1], master=master)
    (offender,) = ranks.start(speak_another_version, 3, ranks=[2], master=master)
    failure = offender.failure()
    assert failure["kind"] == "HandshakeRefused"
    assert f"protocol version {frames.PROTOCOL_VERSION}, this side 77" in failure["text"]
    assert "Install the same version of potluck" in failure["text"]
    started += ranks.start(meet, 3, ranks=[2], master=master)
    assert [process.value() for process in started] == [3, 3, 3]


def come_too_late(place: Place) -> None:
    """Rank 1 once more, when the group is complete."""
    place.join(timeout=1)


def stay(place: Place) -> None:
    """Be in a group until told to leave."""
    with place.join() as backend:
        place.say("joined")
        place.hear("leave")
        backend.barrier(PATIENCE)


def test_a_process_that_comes_to_a_complete_group_is_refused(ranks: Ranks) -> None:
    """It asks again while it has time, as the group might be about to leave, and is then told."""
    master = new_master()
    started = ranks.start(stay, 2, master=master)
    for process in started:
        process.expect("joined")
    (offender,) = ranks.start(come_too_late, 2, ranks=[1], master=master)
    failure = offender.failure()
    assert "ConnectionError" in failure["kinds"] or "TimeoutError" in failure["kinds"]
    assert "this group is complete" in failure["text"]
    for process in started:
        process.tell("leave")
    for process in started:
        process.value()


def test_a_port_in_use_is_named(ranks: Ranks) -> None:
    """Rank 0 says at once which port it wanted and what can be done."""
    port = free_port()
    with contextlib.closing(socket.create_server(("127.0.0.1", port))):
        (zero,) = ranks.start(meet, 2, ranks=[0], master=f"127.0.0.1:{port}")
        failure = zero.failure(timeout=5)
    assert failure["kind"] == "IoError"
    assert f"127.0.0.1:{port}" in failure["text"]
    assert "Another process uses this port" in failure["text"]


def test_a_second_rank_0_finds_its_port_in_use(ranks: Ranks) -> None:
    """The first one goes on waiting, and its group forms."""
    master = new_master()
    started = ranks.start(announce_and_meet, 2, ranks=[0], master=master)
    started[0].expect("here")
    started += ranks.start(announce_and_meet, 2, ranks=[0], master=master)
    started[1].expect("here")
    eventually(lambda: any(map(Rank.has_news, started)))
    (loser,) = filter(Rank.has_news, started)
    failure = loser.failure()
    assert failure["kind"] == "IoError"
    assert "Another process uses this port" in failure["text"]
    (one,) = ranks.start(meet, 2, ranks=[1], master=master)
    (holder,) = [process for process in started if process is not loser]
    assert [holder.value(), one.value()] == [2, 2]


def make_impossible_groups(place: Place) -> list[list[str]]:
    """What constructing and using a group wrongly raises."""
    with place.join() as backend:
        failures = [
            place.failure_of(backend.send, b"", place.rank),
            place.failure_of(backend.recv, bytearray(), place.rank),
            place.failure_of(backend.send, b"", place.world_size),
            place.failure_of(backend.recv, bytearray(), -1),
            place.failure_of(backend.send, b"", True),
        ]
        backend.barrier(PATIENCE)
    place.world_size = 1
    failures.append(place.failure_of(place.join))
    place.world_size, place.rank = 2, 2
    failures.append(place.failure_of(place.join))
    return [failure["kinds"] for failure in failures]


def test_impossible_ranks_are_refused_on_the_spot(ranks: Ranks) -> None:
    """Sending to oneself, a rank that does not exist, a group of one."""
    for kinds in ranks.run(make_impossible_groups, 2):
        first = [names[0] for names in kinds]
        assert first[:4] == ["SelfSend", "SelfSend", "InvalidRank", "InvalidRank"]
        assert first[4:] == ["TypeError", "InvalidWorldSize", "InvalidRank"]
        assert all("ValueError" in names for names in kinds[:4] + kinds[5:])
