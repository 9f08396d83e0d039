"""Fakes that ship with the library, for our tests and for those of its users.

* :class:`VirtualClock` moves when it is pushed; :class:`LocalClock` is a machine's own, wrong one.
* :class:`LossyNetwork` delays, loses and cuts, by lot from a seed.
* :class:`SimulatedCluster` runs the real membership and election of many processes on both.
* :class:`Scenario` is a cluster story as text; :func:`play` plays it.
* ``python -m potluck.testing.seeds`` plays stories drawn by lot, by the thousand.
"""

from __future__ import annotations

from potluck.testing.clock import LocalClock, VirtualClock
from potluck.testing.cluster import SimulatedCluster
from potluck.testing.invariants import Bounds
from potluck.testing.network import LinkQuality, LossyNetwork
from potluck.testing.process import Violation
from potluck.testing.scenario import Scenario, ScenarioError, play

__all__ = [
    "Bounds",
    "LinkQuality",
    "LocalClock",
    "LossyNetwork",
    "Scenario",
    "ScenarioError",
    "SimulatedCluster",
    "Violation",
    "VirtualClock",
    "play",
]
