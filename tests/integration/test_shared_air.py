"""Machines on one access point: what they send and receive shares one radio, and plans know it."""

from __future__ import annotations

import itertools
import json
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import potluck
from potluck.membership.health import HealthConfig
from potluck.schedule.planner import Planner
from potluck.schedule.task import Collective, Task
from support.clusters import new_job
from support.hosts import Host, Hosts
from support.place import Place
from support.ranks import Ranks
from support.threads import PATIENCE

pytestmark = [pytest.mark.netns, pytest.mark.slow]

SENT = 4 << 20  # bytes of a transfer whose crossings are counted
COUNT = 1 << 20  # numbers to add: 4 MiB
NBYTES = 4 * COUNT

RECEIVE = """
import socket
listener = socket.create_server(("0.0.0.0", 5001))
print("listening", flush=True)
line = listener.accept()[0]
while line.recv(1 << 20): pass
"""

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001)) as line:
    line.sendall(bytes(int(sys.argv[2])))
    line.shutdown(socket.SHUT_WR)
    line.recv(1)  # until all of it has arrived
"""


def receiver_on(host: Host) -> subprocess.Popen[str]:
    """A receiver on a host, once it listens."""
    command = host.command([sys.executable, "-c", RECEIVE])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def crossings(hosts: Hosts, source: Host, target: Host) -> float:
    """How often the bytes of a transfer cross the air."""
    with receiver_on(target) as receiver:
        before = hosts.airtime
        source.run([sys.executable, "-c", SEND, target.ipv4, str(SENT)])
        receiver.wait(PATIENCE)
    return (hosts.airtime - before) / SENT


def test_what_goes_between_two_on_one_access_point_crosses_the_air_twice() -> None:
    """The emulation is true: once to or from a cable, never between two cables."""
    with Hosts("desk shelf laptop tablet") as hosts:
        hosts.share_air(["laptop", "tablet"], "200mbit")
        desk, shelf, laptop, tablet = hosts.values()
        assert crossings(hosts, laptop, desk) == pytest.approx(1, rel=0.1)
        assert crossings(hosts, desk, tablet) == pytest.approx(1, rel=0.1)
        assert crossings(hosts, laptop, tablet) == pytest.approx(2, rel=0.1)
        assert crossings(hosts, desk, shelf) == pytest.approx(0, abs=0.01)


def add_up(place: Place, job: str) -> dict[str, Any]:
    """Add up an array by the plan and in a ring, and wait to be told before and after each."""
    with potluck.join(
        3, job=job, timeout=PATIENCE, neighbours=False, known=False, probes=False
    ) as cluster:
        array = np.ones(COUNT, np.float32)
        cluster.all_reduce(array)  # finds out about the links
        links = cluster.group.links
        task = Task.whole(Collective.ALL_REDUCE, world_size=3, count=COUNT)
        plan = Planner(links).plan(task)
        told: dict[str, Any] = {
            "host": platform.node(),
            "air": bool(links.air) and links.air[cluster.rank],
            "algorithm": plan.algorithm,
            "share": plan.shares[cluster.rank],
            "reason": plan.reason,
            "megabits": links.up[cluster.rank] * 8e-6,
            "medium": _kinds(cluster),
            "patience": max(each.patience for each in cluster.health.peers),
        }
        for strategy in (None, "ring"):
            place.say("ready")
            place.hear("go")
            for _ in range(ROUNDS):
                cluster.all_reduce(array, strategy=strategy)
        place.say("ready")
        place.hear("go")
        return told


ROUNDS = 4


def _kinds(cluster: potluck.Cluster) -> dict[str, str]:
    snapshot = cluster.topology.snapshot()
    found: dict[str, str] = {}
    for process in snapshot:
        profile = snapshot.node(process).profile
        assert profile is not None
        assert profile.medium is not None
        found[profile.host] = profile.medium.kind
    return found


def test_a_machine_on_a_cable_makes_the_sums_for_those_on_wifi(ranks: Ranks) -> None:
    """The plan keeps bytes off the air, and takes less of it than a ring, by the counter."""
    with Hosts("desk laptop tablet") as hosts:
        hosts.limit("desk", "1gbit")
        hosts.share_air(["laptop", "tablet"], "200mbit")
        nodes = [ranks.take(host.command) for host in hosts.values()]
        job = new_job()
        for number, node in enumerate(nodes):
            node.begin(add_up, number, len(nodes), "", job)
        counts = []
        for _ in range(3):
            for node in nodes:
                node.expect("ready")
            counts.append(hosts.airtime)
            for node in nodes:
                node.tell("go")
        told = {each["host"]: each for each in (node.value() for node in nodes)}
    kinds = {"desk": "wired", "laptop": "wireless", "tablet": "wireless"}
    assert all(each["medium"] == kinds for each in told.values()), told
    assert {name: each["air"] for name, each in told.items()} == {
        "desk": 0,
        "laptop": 1,
        "tablet": 1,
    }
    assert {name: (each["algorithm"], each["share"]) for name, each in told.items()} == {
        "desk": ("direct", 1),
        "laptop": ("direct", 0),
        "tablet": ("direct", 0),
    }, told["desk"]["reason"]
    assert told["laptop"]["megabits"] == pytest.approx(200, rel=0.35)  # alone on the air
    planned, ring = (
        (after - before) / ROUNDS / NBYTES for before, after in itertools.pairwise(counts)
    )
    # Two machines send their part and receive the sum; in a ring each moves a third more.
    assert planned == pytest.approx(4, rel=0.12)
    assert ring == pytest.approx(16 / 3, rel=0.12)


def test_one_member_on_wifi_gives_the_view_time(ranks: Ranks) -> None:
    """Its deadlines are those for Wi-Fi, without a setting, and the pause holds for all."""
    with Hosts("desk laptop tablet") as hosts:
        hosts.share_air(["laptop"], "200mbit")
        nodes = [ranks.take(host.command) for host in hosts.values()]
        job = new_job()
        for number, node in enumerate(nodes):
            node.begin(look_at_the_pace, number, len(nodes), "", job)
        found = {each["host"]: each for each in (node.value() for node in nodes)}
    wifi, wired = HealthConfig.wifi(), HealthConfig.wired()
    assert {name: each["least"] for name, each in found.items()} == {
        "desk": wired.least_patience,
        "laptop": wifi.least_patience,
        "tablet": wired.least_patience,
    }
    assert {each["pause"] for each in found.values()} == {wifi.pause_after}


def look_at_the_pace(place: Place, job: str) -> dict[str, Any]:
    """After how long a silence this member suspects others, and pauses itself."""
    del place
    with potluck.join(3, job=job, timeout=PATIENCE, neighbours=False, known=False) as cluster:
        cluster.barrier()
        core = cluster._backend._node.control.core
        state = core._state
        found = {
            "host": platform.node(),
            "least": state.config.health.least_patience,
            "pause": state.pause_after,
        }
        cluster.barrier()
        return found


STATUS = [sys.executable, "-m", "potluck", "status", "--json", "--wait", "10"]


def test_status_shows_the_map(ranks: Ranks) -> None:
    """Medium, radio, rates with age and source, as each process has them."""
    with Hosts("desk laptop tablet") as hosts:
        hosts.share_air(["laptop", "tablet"], "200mbit")
        nodes = [ranks.take(host.command) for host in hosts.values()]
        job = new_job()
        for number, node in enumerate(nodes):
            node.begin(add_up, number, len(nodes), "", job)
        shown: dict[str, Any] = {}
        for _ in range(3):
            for node in nodes:
                node.expect("ready")
            if not shown:
                shown = json.loads(hosts["desk"].run(STATUS).stdout)["jobs"][0]
            for node in nodes:
                node.tell("go")
        for node in nodes:
            node.value()
    facts = {each["name"]: (each["medium"], each["radio"]) for each in shown["nodes"]}
    assert facts == {
        "desk": ("wired", None),
        "laptop": ("wireless", 1),
        "tablet": ("wireless", 1),
    }
    links = [each for each in shown["links"] if each["down"]]
    assert links, shown["links"]
    for link in links:
        assert link["rate_source"] == "collectives"
        assert 0 <= link["rate_age"] < PATIENCE
        assert link["interface"] == "eth0"
        assert not link["is_local"]
