"""Clusters of real processes: they form, lose members, and go on."""

from __future__ import annotations

import functools
import signal
import statistics
from typing import Any

import numpy as np

from support.cluster_programs import Crowd
from support.clusters import insist, join, new_job
from support.forks import in_child
from support.place import Place
from support.ports import free_port
from support.ranks import Rank, Ranks

RECOVERED = 2.0  # seconds from a kill to the next successful sum, the median of all survivors
MOST_DIALS = 40  # of one process that meets five others, three of them at one port
AT_LATEST = 10.0  # the same for the slowest of them: other work shares these cores


def outcome(node: Rank, size: int) -> tuple[dict[str, Any], float]:
    """What a survivor was told first, and when it had summed in a view of this size."""
    while (said := node.hear_any())["word"] != "told":
        assert said["word"] == "beat", said
    told = said
    while said["word"] != "view" or said["size"] != size:
        said = node.hear_any()
    return told, said["at"]


def lose(victim: Rank, rank: int, others: list[Rank]) -> list[float]:
    """Kill a node; every survivor names it and goes on.  Seconds until each had summed again."""
    killed = victim.kill()
    found = [outcome(node, len(others)) for node in others]
    for told, _ in found:
        assert told["kind"] == "PeerLost", told
        assert told["rank"] == rank
        assert f"Rank {rank} (" in told["text"]
        assert "killed" in told["text"] or "is dead" in told["text"]
    return [at - killed for _, at in found]


def test_members_and_leaders_may_die(ranks: Ranks) -> None:
    """A member, the leader with a forked child, of two nodes either one; and new ones come."""
    crowd = Crowd(ranks, new_job())
    found = crowd.views(crowd.start(4, 4), 4)
    times = lose(found[2], 2, [found[0], found[1], found[3]])
    found[0].tell("fork")
    times += lose(found[0], 0, [found[1], found[3]])
    times += lose(found[3], 1, [found[1]])
    pair = crowd.views([found[1], *crowd.start(1, 2)], 2)
    times += lose(pair[0], 0, [pair[1]])
    assert statistics.median(times) <= RECOVERED, times
    assert max(times) <= AT_LATEST, times
    everybody = [pair[1], *crowd.start(1, 2)]
    crowd.views(everybody, 2)
    results = crowd.stop(everybody)
    assert [result["size"] for result in results] == [2, 2]


def test_a_process_that_ended_is_not_dialled_where_another_listens_now(ranks: Ranks) -> None:
    """A restarted process often gets the port of the one before it; that costs no handshakes."""
    job = new_job()
    crowd, replaced = Crowd(ranks, job), Crowd(ranks, job, port=free_port())
    nodes = crowd.start(2, 2)
    crowd.views(nodes, 2)
    for _ in range(2):
        victim = replaced.start(1, 3)[0]
        crowd.views([*nodes, victim], 3)
        victim.kill()
        for node in nodes:
            outcome(node, 2)
    nodes += replaced.start(1, 3)
    for _ in range(10):  # signs of progress
        crowd.views(nodes, 3)
    results = crowd.stop(nodes)
    assert max(result["dials"] for result in results) <= MOST_DIALS, results


def test_a_stopped_node_is_left_behind_and_comes_back_by_itself(ranks: Ranks) -> None:
    """The others go on; when it wakes up it learns that it was removed, and joins again."""
    crowd = Crowd(ranks, new_job())
    found = crowd.views(crowd.start(3, 3), 3)
    sleeper, others = found[1], [found[0], found[2]]
    stopped = sleeper.send_signal(signal.SIGSTOP)
    for node in others:
        told, at = outcome(node, 2)
        assert told["kind"] == "PeerLost"
        assert told["rank"] == 1
        assert at - stopped <= AT_LATEST
    sleeper.send_signal(signal.SIGCONT)
    told, _ = outcome(sleeper, 3)
    assert told["kind"] == "LeftOut"
    assert "waits to be let in again" in told["text"]
    crowd.views(others, 3)
    crowd.stop([sleeper, *others])


def test_multicast_alone_brings_processes_together(ranks: Ranks) -> None:
    """No file, no address: they find each other as machines on one network do."""
    crowd = Crowd(ranks, new_job(), multicast=True, neighbours=False)
    nodes = crowd.start(2, 2)
    crowd.views(nodes, 2)
    crowd.stop(nodes)


def misuse(place: Place, job: str) -> list[str]:
    """What a forked child gets that uses its parent's cluster; the parent goes on."""
    with join(1, job) as cluster:
        assert cluster.all_reduce(2.0) == 2.0
        calls = (lambda: cluster.all_reduce(1.0), lambda: cluster.rank, cluster.barrier)
        told = [in_child(call) for call in calls]
        told.append(in_child(cluster.close))
        told.append(in_child(lambda: joined_anew(f"{job}-child")))
        assert cluster.all_reduce(3.0) == 3.0
        return [str(each) for each in told]


def joined_anew(job: str) -> int:
    """A child may join by itself."""
    with join(1, job) as cluster:
        return cluster.world_size


def test_a_forked_child_may_join_anew_and_use_nothing_of_its_parents(ranks: Ranks) -> None:
    """It is told whose cluster it is and what to do; closing it there closes nothing."""
    (told,) = ranks.run(misuse, 1, new_job())
    assert all("belongs to the parent process" in each for each in (told[0], told[2]))
    assert told[3:] == ["None", "1"]


def join_twice(place: Place, job: str, size: int) -> list[float]:
    """Join, add up and leave, and do so once more, as in a cell of a notebook that is run again."""
    sums = []
    for _ in range(2):
        with join(size, job) as cluster:
            mine = np.array([place.rank + 1.0])
            sums.append(float(insist(functools.partial(cluster.all_reduce, mine))[0]))
            place.say("added up")
            place.hear("leave")  # not before all have the sum
        place.say("left")
        place.hear("continue")
    return sums


def test_a_process_may_join_again(ranks: Ranks) -> None:
    """Those who left are not waited for, though they were in the same processes."""
    nodes = ranks.start(join_twice, 2, new_job(), 2)
    for said, answer in [("added up", "leave"), ("left", "continue")] * 2:
        for node in nodes:
            node.expect(said)
        for node in nodes:
            node.tell(answer)
    assert [node.value() for node in nodes] == [[3.0, 3.0], [3.0, 3.0]]


def test_a_job_that_ended_may_be_started_again(ranks: Ranks) -> None:
    """By new processes, and no person is asked: those who ended had left."""
    job = new_job()
    crowd = Crowd(ranks, job)
    for count in (3, 2):
        nodes = crowd.start(count, count)
        crowd.views(nodes, count)
        crowd.stop(nodes)
