"""Processes are killed, stopped and started, cables are cut: nothing stalls, and sums are right.

Every sum that a program gets is checked by the program itself: all members of one view took part,
each as another rank.  All sums of a view are compared among its members.  A seed that fails is
printed; ``POTLUCK_SEED`` repeats its actions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
from collections.abc import Iterator, Sequence

import pytest

from support.chaos import PAUSES, Chaos
from support.cluster_programs import Crowd
from support.clusters import new_job
from support.hosts import Host, Hosts
from support.ranks import Ranks

pytestmark = pytest.mark.slow

logger = logging.getLogger(__name__)

A_WHILE = 45.0  # seconds in the usual tests
PAUSE = 0.02  # seconds between two sums


def go_through(ranks: Ranks, size: int, seconds: float, hosts: Sequence[Host]) -> None:
    """A crowd lives through it, becomes one view again, and ends together."""
    seed = int(os.environ.get("POTLUCK_SEED", random.randrange(1 << 32)))
    logger.warning("POTLUCK_SEED=%d", seed)  # pytest shows it with a failure
    options = {"multicast": True, "neighbours": False} if hosts else {}
    crowd = Crowd(ranks, new_job(), pause=PAUSE, **options)
    chaos = Chaos(crowd, size, seed, hosts)
    alive = chaos.run(seconds)
    assert chaos.actions.total() > seconds / (4 * PAUSES[1]), chaos.actions
    assert chaos.sums.compared > seconds
    assert [result["size"] for result in crowd.stop(alive)] == [len(alive)] * len(alive)
    logger.warning(
        "%g s (%.1f s lost to other work): %s; longest without a sum %.1f s; %d reports compared",
        seconds,
        chaos.starved,
        dict(chaos.actions),
        chaos.longest,
        chaos.sums.compared,
    )


@contextlib.contextmanager
def machines(size: int) -> Iterator[list[Host]]:
    """Emulated ones where that is possible; without them no cables are cut."""
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("nft"):
        with Hosts([f"host{number}" for number in range(size)]) as hosts:
            yield list(hosts.values())
    else:
        assert os.environ.get("CI") != "true", "cables are cut in CI: that needs root, ip and nft"
        yield []


@pytest.mark.timeout(4 * A_WHILE)
def test_a_cluster_lives_through_a_bad_minute(ranks: Ranks) -> None:
    """The short form of the soak below; it sleeps most of the time."""
    with machines(4) as hosts:
        go_through(ranks, 4, A_WHILE, hosts)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_cluster_lives_through_a_bad_half_hour(ranks: Ranks) -> None:
    """Eight processes; ``POTLUCK_SOAK`` gives the seconds."""
    with machines(8) as hosts:
        go_through(ranks, 8, float(os.environ.get("POTLUCK_SOAK", "1800")), hosts)
