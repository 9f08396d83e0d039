"""What a story can expect of its cluster: conditions as short sentences.

========================  =======================================================================
``a b c in one view``     exactly these are at work in one view
``all in one view``       all living processes but observers are at work in one view
``a b together``          these are at work in one view, perhaps with others
``a paused``              also ``active``, ``joining`` and ``gone`` (dead or left); several names
``a leads b``             rank 0 of the view of b is a
``a was removed``         it learned that it was excluded, since its last start
``a says "no quorum"``    these words are in its present reason, or in a note since its last start
``a trained at least 20`` this many steps are in its state
``a b await c``           their training waits for c, which may have its state
``a gave up steps``       it counted some that it lost in a merge, since its last start
``not …``                 the opposite of any of these
========================  =======================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable

from potluck.core.cluster_effects import Note, Removed
from potluck.core.cluster_events import ClusterState
from potluck.testing.cluster import SimulatedCluster
from potluck.testing.scenario import NAMES, ScenarioError

__all__ = ["Condition", "condition"]

Condition = Callable[[], bool]

_STATES = {
    "active": ClusterState.ACTIVE,
    "paused": ClusterState.PAUSED,
    "joining": ClusterState.JOINING,
    "gone": ClusterState.LEFT,
}


def _one_view(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    return cluster.in_one_view(*match[1].split())


def _all(cluster: SimulatedCluster, _: re.Match[str]) -> bool:
    return cluster.invariants.why_not_converged() is None


def _together(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    names = match[1].split()
    views = {cluster.view_of(name) for name in names}
    return (
        len(views) == 1
        and None not in views
        and all(cluster.state_of(name) is ClusterState.ACTIVE for name in names)
    )


def _in_state(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    return all(cluster.state_of(name) is _STATES[match[2]] for name in match[1].split())


def _leads(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    view = cluster.view_of(match[2])
    return view is not None and view.leader == cluster.place(match[1]).process


def _was_removed(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    return any(isinstance(effect, Removed) for effect in cluster.place(match[1]).told)


def _says(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    place = cluster.place(match[1])
    reason = place.core.reason if place.core is not None else ""
    notes = (str(effect.event) for effect in place.told if isinstance(effect, Note))
    return match[2] in reason or any(match[2] in note for note in notes)


def _trained(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    trainer = cluster.trainer_of(match[1])
    return trainer is not None and trainer.value.depth >= int(match[2])


def _await(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    trainers = map(cluster.trainer_of, match[1].split())
    past = cluster.place(match[2]).past
    return all(each is not None and not past.isdisjoint(each.awaited) for each in trainers)


def _gave_up(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    return cluster.place(match[1]).process in cluster.invariants.ledger.losers


_CONDITIONS: tuple[
    tuple[re.Pattern[str], Callable[[SimulatedCluster, re.Match[str]], bool]], ...
] = (
    (re.compile(r"all in one view"), _all),
    (re.compile(rf"({NAMES}) in one view"), _one_view),
    (re.compile(rf"({NAMES}) together"), _together),
    (re.compile(r"(\w+) leads (\w+)"), _leads),
    (re.compile(r"(\w+) was removed"), _was_removed),
    (re.compile(r'(\w+) says "([^"]+)"'), _says),
    (re.compile(r"(\w+) trained at least (\d+)"), _trained),
    (re.compile(r"(\w+) gave up steps"), _gave_up),
    (re.compile(rf"({NAMES}) awaits? (\w+)"), _await),
    (re.compile(rf"({NAMES}) (active|paused|joining|gone)"), _in_state),
)


def condition(cluster: SimulatedCluster, text: str) -> Condition:
    """A question to the cluster that is true when the sentence is."""
    if text.startswith("not "):
        positive = condition(cluster, text.removeprefix("not "))
        return lambda: not positive()
    for pattern, holds in _CONDITIONS:
        if match := pattern.fullmatch(text):
            found = match
            return lambda: holds(cluster, found)
    raise ScenarioError(
        f"'{text}' is no expectation.  Try one of: a b in one view; a b together; a paused; "
        f"a leads b; a was removed; a says \"words\"; or one of them after 'not'."
    )
