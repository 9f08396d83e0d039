"""A machine too busy for its own nodes: those that starve together stay together."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from support.cluster_programs import Crowd
from support.clusters import new_job
from support.ranks import Ranks

pytestmark = pytest.mark.slow

STARVED = (2.5, 0.9, 0.3, 1.3)  # seconds without a processor, five in all
GRANTED = 0.05  # seconds of it in between


def test_nobody_is_removed_while_all_starve_alike(ranks: Ranks) -> None:
    """Five seconds with hardly a processor, longer at a time than silence would be borne."""
    crowd = Crowd(ranks, new_job())
    nodes = crowd.start(3, 3)
    crowd.views(nodes, 3)
    for seconds in STARVED:
        for node in nodes:
            node.send_signal(signal.SIGSTOP)
        time.sleep(seconds)  # not to wait for something: this is what happens to them
        for node in nodes:
            node.send_signal(signal.SIGCONT)
        time.sleep(GRANTED)
    results = crowd.stop(nodes)
    assert [result["told"] for result in results] == [0, 0, 0]


def test_a_group_beside_busy_loops_stays_in_one_view(ranks: Ranks) -> None:
    """Eight members and eight processes that never wait, on whatever this machine has."""
    crowd = Crowd(ranks, new_job())
    nodes = crowd.start(8, 8)
    crowd.views(nodes, 8)
    program = "while True: sum(range(10_000))"
    loops = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(8)]
    try:
        time.sleep(5)  # not to wait for something: this is what happens to them
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    results = crowd.stop(nodes)
    assert [result["told"] for result in results] == [0] * 8
