"""The picture: what the page shows, made of what observers know; plain data, no page in it.

Sentences are those of ``potluck status``, which are those of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from potluck.apps.cli.status_facts import JobStatus, NodeStatus, jobs_of, story_of, waiting_of
from potluck.apps.dashboard.gauges import Gauges
from potluck.apps.dashboard.links import links_of, name_key, ring_of
from potluck.runtime.control_reports import Report
from potluck.runtime.observing_chronicle import Chronicle, Gone, News
from potluck.runtime.observing_journal import EpochLine, Journal

__all__ = ["Scene", "draw", "draw_news", "lately_gone", "lighten"]

Key: TypeAlias = tuple[str, int]

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
    foreigners: Sequence[str] = ()
    """What is seen of machines in other namespaces, in words."""


def draw(scene: Scene) -> dict[str, Any]:
    """The whole picture."""
    found, waiting = jobs_of(scene.reports), waiting_of(scene.reports)
    story = story_of(scene.namespace, scene.job, found, waiting, scene.troubles, scene.foreigners)
    journals = scene.chronicle.journals
    gone = lately_gone(scene.chronicle, scene.now)
    jobs = [_job(scene, each, journals, gone) for each in found]
    jobs += [_ended_job(scene, each, gone) for each in ended_jobs(found, gone)]
    return {
        "namespace": scene.namespace,
        "time": round(scene.now, 2),
        "story": story,
        "jobs": jobs,
        "waiting": waiting,
        "unreachable": dict(scene.troubles),
        "discovery": dict(scene.discovery),
    }


def lately_gone(chronicle: Chronicle, now: float) -> list[Gone]:
    """Members that are gone and still shown."""
    return [
        each
        for each in chronicle.gone
        if each.report.role == "member" and now - each.time < SHOWN_FOR
    ]


def ended_jobs(found: Sequence[JobStatus], gone: Sequence[Gone]) -> list[str]:
    """Jobs on which nobody works any more, by name; what they came to is still shown."""
    return sorted({each.report.job for each in gone} - {each.job for each in found})


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


def _job(
    scene: Scene, job: JobStatus, journals: Mapping[Key, Journal], gone: Sequence[Gone]
) -> dict[str, Any]:
    epochs = scene.chronicle.epochs(job.job)
    nodes = [_node(scene, each, journals) for each in job.nodes]
    nodes += [_gone_node(each, epochs) for each in _unreplaced(scene.chronicle, job, gone)]
    told, ring = job.authority, ring_of(job, journals)
    return {
        "job": job.job,
        "ended": False,
        "state": told.state,
        "reason": told.reason,
        "lineage": told.lineage,
        "epoch": told.epoch,
        "sentence": job.sentence,
        "remarks": job.remarks,
        "nodes": nodes,
        "links": links_of(job, journals, ring),
        "ring": ring,
        "epochs": [_epoch(each) for each in epochs],
        "loss": scene.gauges.loss(job.job),
    }


def _unreplaced(chronicle: Chronicle, job: JobStatus, gone: Sequence[Gone]) -> list[Gone]:
    """Processes of a job that are gone, without those in whose place their machine began another.

    A machine that was restarted is one machine; of several workers each stands for itself.
    """
    here = {(node.node, node.incarnation) for node in job.nodes}
    ended = [each for each in gone if each.report.job == job.job and each.report.key not in here]
    later = sorted({*here, *(each.report.key for each in ended)})
    found = []
    for each in sorted(ended, key=lambda one: one.time):
        node, incarnation = each.report.key
        instead = next(
            (
                key
                for key in later
                if key[0] == node and key[1] > incarnation and chronicle.since(key) > each.time
            ),
            None,
        )
        if instead is None:
            found.append(each)
        else:
            later.remove(instead)  # it stands for one
    return found


def _ended_job(scene: Scene, job: str, gone: Sequence[Gone]) -> dict[str, Any]:
    """What is left of a job: who worked on it, in which views, and how far it came."""
    epochs = scene.chronicle.epochs(job)
    last = epochs[-1] if epochs else None
    return {
        "job": job,
        "ended": True,
        "state": "ended",
        "reason": "",
        "lineage": last.lineage if last else "",
        "epoch": last.epoch if last else 0,
        "sentence": "",
        "remarks": [],
        "nodes": [_gone_node(each, epochs) for each in gone if each.report.job == job],
        "links": [],
        "ring": [],
        "epochs": [_epoch(each) for each in epochs],
        "loss": scene.gauges.loss(job),
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
        "figures": _shown(figures),
        "waits_for": _waits_for(figures),
        "samples": [each.as_list() for each in scene.gauges.samples(key)],
    }


def _shown(figures: Mapping[str, float]) -> dict[str, float]:
    """What is shown of what a process counts; of failures, also which operations failed."""
    failed = [name for name, count in figures.items() if name.endswith(".failed") and count]
    return {name: figures[name] for name in dict.fromkeys([*FIGURES, *failed]) if name in figures}


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
    word = "left" if gone.is_orderly else "gone"
    status = NodeStatus(None, told.name or told.node[:8], *told.key, None, word, reason)
    return {
        **status.as_dict(),
        "address": f"{told.host}:{told.port}",
        "pid": told.pid,
        "version": told.version,
        "state": word,
        "reason": reason,
        "key": name,
        "gone": round(gone.time, 1),
        "up": 0,
        "down": 0,
        "figures": {},
        "waits_for": None,
        "samples": [],
    }


def _epoch(line: EpochLine) -> dict[str, Any]:
    return {
        "epoch": line.epoch,
        "lineage": line.lineage,
        "time": round(line.time, 2),
        "members": line.members,
        "reason": line.reason,
    }
