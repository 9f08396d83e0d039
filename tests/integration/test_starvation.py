"""A machine too busy for its own nodes: those that starve together stay together."""

from __future__ import annotations

import signal
import time

from support.cluster_programs import Crowd
from support.clusters import new_job
from support.ranks import Ranks

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
