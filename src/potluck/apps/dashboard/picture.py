"""The picture: what the page shows, made of what observers know; plain data, no page in it.

Sentences are those of ``potluck status``, which are those of the log.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from potluck.apps.cli.status_facts import JobStatus, NodeStatus, jobs_of, story_of, waiting_of
from potluck.apps.dashboard.gauges import Gauges
from potluck.runtime.control_reports import Report
from potluck.runtime.observing_chronicle import Chronicle, Gone, News
from potluck.runtime.observing_journal import EpochLine, Journal
from potluck.vocabulary import LinkMatrix

__all__ = ["Scene", "draw", "draw_news", "lighten"]

Key: TypeAlias = tuple[str, int]

LARGEST = (1 << 32) - 1
"""Nanoseconds that a link matrix can hold."""

MAX_DIGITS = 8
"""Of a rank's number."""

SHOWN_FOR = 600.0
"""Seconds that a process is shown after it is gone."""

FIGURES = (
    "collectives.completed",
    "collectives.failed",
    "collectives.retried",
    "all_reduce.p50_ms",
    "all_reduce.p95_ms",
    "compression.ratio",
    "compression.raw_bytes",
    "compression.sent_bytes",
    "training.step",
    "training.loss",
    "training.step_ms",
    "training.repeated",
    "training.samples_per_second",
    "uptime_seconds",
)
"""Of what a process counts, what is shown."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known at one moment."""

    namespace: str
    job: str | None
    reports: Sequence[Report]
    troubles: Mapping[str, str]
    discovery: Mapping[str, str]
    chronicle: Chronicle
    gauges: Gauges
    now: float


def draw(scene: Scene) -> dict[str, Any]:
    """The whole picture."""
    found, waiting = jobs_of(scene.reports), waiting_of(scene.reports)
    story = story_of(scene.namespace, scene.job, found, waiting, scene.troubles)
    journals = scene.chronicle.journals
    gone = [each for each in scene.chronicle.gone if scene.now - each.time < SHOWN_FOR]
    jobs = [_job(scene, each, journals, gone) for each in found]
    return {
        "namespace": scene.namespace,
        "time": round(scene.now, 2),
        "story": story,
        "jobs": jobs,
        "waiting": waiting,
        "unreachable": dict(scene.troubles),
        "discovery": dict(scene.discovery),
    }


def lighten(picture: dict[str, Any]) -> dict[str, Any]:
    """The same without what a page that has seen the last one knows: of curves, the last point."""
    jobs = [
        {
            **job,
            "loss": job["loss"][-1:],
            "nodes": [{**node, "samples": node["samples"][-1:]} for node in job["nodes"]],
        }
        for job in picture["jobs"]
    ]
    return {**picture, "jobs": jobs}


def draw_news(news: Sequence[News]) -> list[dict[str, Any]]:
    """What happened, for the page."""
    return [
        {
            "number": each.number,
            "time": round(each.time, 3),
            "job": each.job,
            "who": name_key(each.who),
            "name": each.name,
            "level": each.level,
            "text": each.text,
        }
        for each in news
    ]


def name_key(key: Key) -> str:
    """A process, in one word."""
    return f"{key[0]}/{key[1]}"


def _job(
    scene: Scene, job: JobStatus, journals: Mapping[Key, Journal], gone: Sequence[Gone]
) -> dict[str, Any]:
    epochs = scene.chronicle.epochs(job.job)
    here = {node.node + str(node.incarnation) for node in job.nodes}
    nodes = [_node(scene, each, journals) for each in job.nodes]
    nodes += [
        _gone_node(each, epochs)
        for each in gone
        if each.report.job == job.job
        and each.report.role == "member"
        and each.report.node + str(each.report.incarnation) not in here
    ]
    told = job.authority
    return {
        "job": job.job,
        "state": told.state,
        "reason": told.reason,
        "lineage": told.lineage,
        "epoch": told.epoch,
        "sentence": job.sentence,
        "remarks": job.remarks,
        "nodes": nodes,
        "links": _links(job, journals),
        "ring": _ring(job, journals),
        "epochs": [_epoch(each) for each in epochs],
        "loss": scene.gauges.loss(job.job),
    }


def _node(scene: Scene, node: NodeStatus, journals: Mapping[Key, Journal]) -> dict[str, Any]:
    key = (node.node, node.incarnation)
    journal = journals.get(key)
    figures = journal.figures if journal else {}
    is_silent = node.report is None and node.health in {"", "healthy"}
    silence = {"health": "silent", "health_reason": "it does not answer"} if is_silent else {}
    return {
        **node.as_dict(),
        **silence,
        "key": name_key(key),
        "gone": None,
        "up": journal.up if journal else 0,
        "down": journal.down if journal else 0,
        "figures": {name: figures[name] for name in FIGURES if name in figures},
        "waits_for": _waits_for(figures),
        "samples": [each.as_list() for each in scene.gauges.samples(key)],
    }


def _waits_for(figures: Mapping[str, float]) -> int | None:
    """The rank for which a process has waited longest; None if it has waited for nobody."""
    waited = {
        int(rank): seconds
        for name, seconds in figures.items()
        if (rank := name.removeprefix("waiting.")) != name and _is_rank(rank) and seconds > 0
    }
    return max(waited, key=lambda rank: waited[rank], default=None)


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS


def _gone_node(gone: Gone, epochs: Sequence[EpochLine]) -> dict[str, Any]:
    """Somebody who was here, with the sentence by which the others went on."""
    told = gone.report
    name = name_key(told.key)
    was_in = [number for number, epoch in enumerate(epochs) if name in epoch.members]
    after = epochs[was_in[-1] + 1 :] if was_in else []
    reason = after[0].reason if after else gone.cause
    status = NodeStatus(None, told.name or told.node[:8], *told.key, None, "gone", reason)
    return {
        **status.as_dict(),
        "address": f"{told.host}:{told.port}",
        "pid": told.pid,
        "version": told.version,
        "state": "gone",
        "reason": reason,
        "key": name,
        "gone": round(gone.time, 1),
        "up": 0,
        "down": 0,
        "figures": {},
        "waits_for": None,
        "samples": [],
    }


def _links(job: JobStatus, journals: Mapping[Key, Journal]) -> list[dict[str, Any]]:
    """Every link as each of its ends sees it."""
    ranks = {(each.node, each.incarnation): rank for rank, each in enumerate(job.authority.members)}
    found = []
    for report in job.reports:
        journal = journals.get(report.key)
        for line in report.peers:
            target = (line.node, line.incarnation)
            rank = ranks.get(target)
            times = journal.latency if journal is not None else []
            latency = times[rank] if rank is not None and rank < len(times) else 0
            found.append(
                {
                    "from": name_key(report.key),
                    "to": name_key(target),
                    "address": line.address,
                    "status": line.status,
                    "reason": line.reason,
                    "round_trip": line.round_trip,
                    "latency": latency * 1e-9 if latency else None,
                }
            )
    return found


def _ring(job: JobStatus, journals: Mapping[Key, Journal]) -> list[str]:
    """The members in the order in which the way round is shortest, by what they measured."""
    members = [(each.node, each.incarnation) for each in job.authority.members]
    rows = [journals.get(each) for each in members]
    if len(members) < 3:  # noqa: PLR2004 - of two there is one order
        return [name_key(each) for each in members]
    known = [row for row in rows if row is not None and len(row.latency) == len(members)]
    if len(known) < len(members) or any(row.up <= 0 for row in known):
        return [name_key(each) for each in members]
    matrix = LinkMatrix(
        tuple(row.up for row in known),
        tuple(max(0, row.down) for row in known),
        tuple(tuple(min(max(0, time), LARGEST) for time in row.latency) for row in known),
    )
    return [name_key(members[rank]) for rank in _order(matrix)]


@functools.lru_cache(maxsize=16)
def _order(matrix: LinkMatrix) -> tuple[int, ...]:
    from potluck.collective.planner import Planner

    return tuple(Planner(matrix).ring)


def _epoch(line: EpochLine) -> dict[str, Any]:
    return {
        "epoch": line.epoch,
        "lineage": line.lineage,
        "time": round(line.time, 2),
        "members": line.members,
        "reason": line.reason,
    }
