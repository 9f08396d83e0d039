"""Clusters of emulated machines: two commands each, cables pulled, partitions healed."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import potluck
from potluck.schedule.planner import Planner
from potluck.schedule.task import Collective, Task
from support.cluster_programs import Crowd
from support.clusters import new_job
from support.command import COMMAND
from support.hosts import Hosts
from support.paired_hosts import pair, variables
from support.place import Place
from support.ranks import Rank, Ranks
from support.threads import PATIENCE

pytestmark = [pytest.mark.netns, pytest.mark.slow]

AT_LATEST = 10.0  # seconds to go on without a machine that fell silent: three, and some for others

TRAIN = """
import json, sys
import numpy as np
import potluck

with potluck.join(timeout=30) as cluster:
    truth = np.arange(4.0)
    weights, data = np.zeros(4), np.random.default_rng(cluster.rank)
    for _ in range(60):
        inputs = data.normal(size=(32, 4))
        gradient = 2 * inputs.T @ (inputs @ weights - inputs @ truth) / 32
        cluster.all_reduce(gradient, "mean")
        weights -= 0.1 * gradient
    together = cluster.all_gather_object(weights.tobytes().hex())
    error = float(abs(weights - truth).max())
    print(json.dumps([cluster.world_size, len(set(together)), error, sys.argv[1:]]))
"""


def test_two_machines_pair_and_train_with_two_commands_each(tmp_path: Path) -> None:
    """``potluck pair`` and ``potluck run train.py`` on both: nothing else is needed."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with Hosts("alpha beta") as hosts:
        alpha, beta = hosts.values()
        pair(tmp_path, alpha, beta)
        runs = [
            subprocess.Popen(
                host.command([str(COMMAND), "run", str(script), "--epochs", "1"]),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=variables(tmp_path, host),
            )
            for host in hosts.values()
        ]
        told = [run.communicate(timeout=2 * PATIENCE) for run in runs]
        assert [run.returncode for run in runs] == [0, 0], told
        for host, (output, notes) in zip(hosts.values(), told, strict=True):
            size, variants, error, arguments = json.loads(output)
            assert (size, variants, arguments) == (2, 1, ["--epochs", "1"])
            assert error < 0.01
            assert f"1 of 2 is here: {host.name}; missing:" in notes or "2 of 2 are here" in notes
            assert "2 of 2 are here" in notes


def test_a_pulled_cable_stops_one_machine_and_plugging_it_in_brings_it_back(ranks: Ranks) -> None:
    """The two go on within seconds; the third pauses, and joins them again by itself."""
    with Hosts("alpha beta gamma") as hosts:
        crowd = Crowd(ranks, new_job(), multicast=True, neighbours=False)
        nodes = crowd.start(3, 3, [host.command for host in hosts.values()])
        found = crowd.views(nodes, 3)
        cut, others = found[2], [found[0], found[1]]
        host = list(hosts.values())[nodes.index(cut)]
        pulled = time.monotonic()
        host.unplug()
        for node in others:
            while (said := node.hear_any())["word"] != "told":
                pass
            assert said["kind"] == "PeerLost"
            assert said["rank"] == 2
            while (said := node.hear_any())["word"] != "view":
                pass
            assert said["size"] == 2
            assert said["at"] - pulled <= AT_LATEST
        host.ip("link", "set", "eth0", "up")
        crowd.views([cut, *others], 3)
        crowd.stop(nodes)


COUNT = 1 << 20  # numbers to add: 4 MiB
TRIES = 3


def plan_sums(place: Place, job: str) -> dict[str, Any]:
    """Add up a large array once; by which plan, and what the links are taken for."""
    with potluck.join(4, job=job, timeout=PATIENCE, neighbours=False, known=False) as cluster:
        sums = cluster.all_reduce(np.full(COUNT, cluster.rank + 1, np.float32))
        assert (sums == 10).all()
        links = cluster.group.links
        plan = Planner(links).plan(Task.whole(Collective.ALL_REDUCE, world_size=4, count=COUNT))
        place.say("planned")
        place.hear("leave")
        return {
            "host": platform.node(),
            "algorithm": plan.algorithm,
            "share": plan.shares[cluster.rank],
            "megabits": links.up[cluster.rank] * 8e-6,
        }


def plans_of(nodes: list[Rank]) -> dict[str, dict[str, Any]]:
    """What the nodes of a new cluster plan, by host."""
    job = new_job()
    for number, node in enumerate(nodes):
        node.begin(plan_sums, number, len(nodes), "", job)
    for node in nodes:
        node.expect("planned")
    for node in nodes:
        node.tell("leave")
    return {result["host"]: result for result in (node.value() for node in nodes)}


def test_a_slow_link_carries_no_more_than_it_must(ranks: Ranks) -> None:
    """Of four machines one has a fifth of the others' rate: the other three make the sums."""
    rates = {"alpha": 200, "beta": 200, "gamma": 200, "delta": 40}
    wanted = {"alpha": ("direct", 1), "beta": ("direct", 1), "gamma": ("direct", 1)}
    found: dict[str, dict[str, Any]] = {}
    with Hosts(list(rates)) as hosts:
        for name, rate in rates.items():
            hosts.limit(name, f"{rate}mbit")
        nodes = [ranks.take(host.command) for host in hosts.values()]
        for _ in range(TRIES):  # other work may slow down any one of the equal links for a moment
            found = plans_of(nodes)
            assert found["delta"]["share"] == 0, found
            assert found["delta"]["megabits"] < found["alpha"]["megabits"] / 2, found
            plans = {name: (each["algorithm"], each["share"]) for name, each in found.items()}
            if plans == {**wanted, "delta": ("direct", 0)}:
                return
    pytest.fail(f"the equal links have other shares every time: {found}")
