"""Processes that tell every error their cluster raises, and a check that these errors agree."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

import potluck
from support.clusters import OPTIONS
from support.place import Place, as_failure
from support.ranks import Rank, Ranks, Wrap
from support.threads import PATIENCE

Told: TypeAlias = dict[str, Any]

LONGEST = 60.0  # seconds until a view or an error that is waited for
SIGN = 0.2  # seconds between two signs of progress
PAUSE = 0.005  # seconds between two sums
FACTS = ("kind", "text", "cause", "rank", "node", "host")  # of an error


def name_of(number: int) -> str:
    """What the process of this number is called; no name is a part of another."""
    return f"node-{number}-here"


def tell_errors(place: Place, job: str, min_nodes: int, options: dict[str, Any]) -> int:
    """Add up until the test says "stop" to any node; say every error and every view."""
    options = {**OPTIONS, "name": name_of(place.rank), **options}
    limit = options.pop("limit", None)
    cluster = potluck.join(min_nodes, job=job, timeout=PATIENCE, **options)
    count, sign, seen, is_stopping = 0, 0.0, "", False
    with cluster:
        while True:
            word = place.next_word()
            is_stopping = is_stopping or word == "stop"
            try:
                sums = cluster.all_reduce(np.array([1.0, float(is_stopping)]), timeout=limit)
            except potluck.DistributedError as error:
                place.say("told", **facts_of(cluster, error))
                if not error.recoverable:
                    raise
                continue
            count += 1
            view = cluster._sessions.read(PATIENCE).view.session.hex()
            if view != seen or time.monotonic() >= sign:
                seen, sign = view, time.monotonic() + SIGN
                place.say("view", size=int(sums[0]), rank=cluster.rank, view=view)
            if sums[1]:
                return count
            time.sleep(PAUSE)


def facts_of(cluster: potluck.Cluster, error: potluck.DistributedError) -> Told:
    """An error, and the view in which the program stood."""
    stood = cluster._sessions._caller.session
    assert stood is not None
    facts = {"node": error.node, "host": error.host, "cause": error.cause}
    return {**as_failure(error), **facts, "of": stood.view.session.hex()}


class Witnesses:
    """The processes of one cluster, and what each was told so far."""

    def __init__(self, ranks: Ranks, job: str, **options: Any) -> None:
        self._ranks = ranks
        self._job = job
        self._options = options
        self.nodes: list[Rank] = []
        self.told: dict[Rank, list[Told]] = {}
        self.places: dict[Rank, int] = {}
        """The rank of each in the view it was last seen in."""

    def start(self, count: int, wraps: Sequence[Wrap] = ()) -> list[Rank]:
        """Start a cluster and wait until all are in."""
        for number in range(count):
            node = self._ranks.take(wraps[number] if wraps else None)
            node.begin(tell_errors, number, count, "", self._job, count, self._options)
            self.nodes.append(node)
            self.told[node] = []
        while len({self.wait_for([node], count) for node in self.nodes}) > 1:
            pass  # some were in before the others
        for told in self.told.values():
            told.clear()
        return self.nodes

    def name(self, node: Rank) -> str:
        """What errors call it."""
        return name_of(self.nodes.index(node))

    def wait_for(self, nodes: Sequence[Rank], size: int) -> str:
        """Hear what these are told, until each is in a view of this size; that of the last."""
        view = ""
        deadline = time.monotonic() + LONGEST
        for node in nodes:
            while (said := node.hear_any())["word"] != "view" or said["size"] != size:
                if said["word"] == "told":
                    self.told[node].append(said)
                assert time.monotonic() < deadline, (self.name(node), said, self.told)
            self.places[node], view = said["rank"], said["view"]
        return view

    def wait_until_told(self, node: Rank, kind: str) -> Told:
        """Hear what one is told, until it is an error of this kind."""
        deadline = time.monotonic() + LONGEST
        while True:
            said = node.hear_any()
            if said["word"] == "told":
                self.told[node].append(said)
                if said["kind"] == kind:
                    return said
            assert time.monotonic() < deadline, (self.name(node), said, self.told)

    def wait_until_told_any(self, node: Rank) -> Told:
        """Hear what one is told, until it is an error."""
        deadline = time.monotonic() + LONGEST
        while (said := node.hear_any())["word"] != "told":
            assert time.monotonic() < deadline, (self.name(node), said, self.told)
        self.told[node].append(said)
        return said

    def check(self, gone: Sequence[Rank]) -> None:
        """Members of the next view have the same error; it names none but those left out of it."""
        by_view: dict[str, dict[tuple[Any, ...], list[str]]] = {}
        left_out: dict[str, list[str]] = {}
        for node, told in self.told.items():
            for error in told:
                if error["kind"] == "LeftOut":
                    left_out.setdefault(error["of"], []).append(self.name(node))
                elif "missed view" not in error["text"]:
                    facts = tuple(error[fact] for fact in FACTS)
                    found = by_view.setdefault(error["of"], {})
                    found.setdefault(facts, []).append(self.name(node))
        for view, errors in by_view.items():
            assert len(errors) == 1, errors
            (facts,) = errors
            if facts[0] != "PeerLost":
                assert facts[0] == "ViewChanged", facts
                continue
            message = facts[1].split(":")[0]
            named = {self.name(node) for node in self.nodes if self.name(node) in message}
            assert named, facts
            possible = {*map(self.name, gone), *left_out.get(view, ())}
            assert named <= possible, (facts, gone, left_out)

    def check_named(self, survivors: Sequence[Rank], *victims: Rank) -> None:
        """Every survivor was told the same, in the same order: the loss of all of these."""
        first = self._facts(survivors[0])
        for node in survivors:
            assert self._facts(node) == first, self.told
        losses = [text for kind, text, *_ in first if kind == "PeerLost"]
        for victim in victims:
            assert any(self.name(victim) in text for text in losses), first

    def _facts(self, node: Rank) -> list[tuple[Any, ...]]:
        return [tuple(error[fact] for fact in FACTS) for error in self.told[node]]

    def stop(self, nodes: Sequence[Rank]) -> None:
        """Let them come to an end together."""
        nodes[0].tell("stop")
        for node in nodes:
            node.last_value()
