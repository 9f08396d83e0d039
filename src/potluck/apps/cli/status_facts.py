"""What ``potluck status`` found, put together from the reports of all processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from types import MappingProxyType
from typing import Any

from potluck._types import sharing_air
from potluck._version import Build, mixed
from potluck.apps.cli.output import list_names
from potluck.cluster.reports import HealthLine, LinkLine, StatusReport
from potluck.membership.topology import NodeProfile
from potluck.net.addresses import NO_NETWORK

MAX_TROUBLES = 4
"""Machines that cannot be reached, of which the reasons are told."""

_MINUTES, _HOURS = 120, 7200  # seconds from which a time is told in these

_WORST = ("healthy", "degraded", "suspect", "dead")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One process of a job."""

    rank: int | None
    name: str
    node: str
    incarnation: int
    report: StatusReport | None
    """What it says itself; None if it does not answer."""
    health: str
    """The worst that any other says of it."""
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        told = self.report
        return {
            "rank": self.rank,
            "name": self.name,
            "id": self.node,
            "incarnation": self.incarnation,
            "address": f"{told.host}:{told.port}" if told else None,
            "pid": told.pid if told else None,
            "version": told.version if told else None,
            "protocol": told.protocol if told else None,
            "state": told.state if told else "silent",
            "reason": told.reason if told else "it does not answer",
            "health": self.health,
            "health_reason": self.reason,
            "medium": told.medium.kind if told and told.medium else None,
            "battery": None if told is None or told.battery is None else told.battery.percent,
            "is_plugged": None if told is None or told.battery is None else told.battery.plugged,
        }


@dataclass(frozen=True, slots=True)
class WaitingProcesses:
    """Processes of a job that cannot continue, and the members of the last view they wait for."""

    job: str
    here: tuple[str, ...]
    missing: tuple[tuple[str, float], ...]
    """The name of each, and the seconds since any of those who wait has heard it."""

    @property
    def sentence(self) -> str:
        """Who waits for whom, and for how long already."""
        return self._told(lambda silence: f"silent for {_duration(silence)}")

    @property
    def story(self) -> str:
        """The same with times of the day: it stays as it is while nothing happens."""
        now = time.time()
        return self._told(
            lambda silence: f"silent since {time.strftime('%H:%M', time.localtime(now - silence))}"
        )

    def _told(self, since: Callable[[float], str]) -> str:
        names = [f"{name} ({since(silence)})" for name, silence in self.missing]
        verb = "waits" if len(self.here) == 1 else "wait"
        return f"{list_names(self.here)} {verb} for {list_names(names)}."

    @property
    def advice(self) -> str:
        """The command that continues."""
        them = "it is" if len(self.missing) == 1 else "they are"
        return f"If {them} switched off, continue with: potluck continue --job {quote(self.job)}"

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        missing = [{"name": name, "silent_for": silence} for name, silence in self.missing]
        return {"here": list(self.here), "missing": missing}


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job of a group."""

    job: str
    authority: StatusReport
    """Whose view counts: of those who are active and up to date, the one of the largest view."""
    nodes: tuple[NodeStatus, ...]
    reports: tuple[StatusReport, ...]

    @property
    def leader(self) -> str:
        """The name of rank 0."""
        members = self.authority.members
        return members[0].name or members[0].node[:8] if members else ""

    @property
    def sentence(self) -> str:
        """The whole job in one sentence."""
        told = self.authority
        is_plain = told.members and told.state == "active"
        return self.headline if is_plain else f"{self.headline} ({told.reason})"

    @property
    def headline(self) -> str:
        """The same without a reason."""
        told = self.authority
        if not told.members:
            return f'"{self.job}": no view yet'
        count = len(told.members)
        text = f'"{self.job}": view {told.epoch} of {count} node{"s" * (count != 1)}, '
        return f"{text}led by {self.leader}, {told.state}"

    @property
    def remarks(self) -> list[str]:
        """What is to be said beside it: how this view came about, and who is not well."""
        told = self.authority
        found = []
        if told.members and told.reason and told.state == "active":
            found.append(f"View {told.epoch}: {told.reason}")
        waiting = waiting_for(self.reports)
        if waiting is not None:
            found += [waiting.story, waiting.advice]
        if versions := mixed(builds_of(self.reports)):
            found.append(". ".join(versions))
        for node in self.nodes:
            if node.reason and node.health != "healthy":
                found.append(f"{node.name} is {node.health}: {node.reason}")
            elif node.report is None:
                found.append(f"{node.name} does not answer.")
        return found

    def as_dict(
        self, figures: Mapping[tuple[str, int], Mapping[str, float]] = MappingProxyType({})
    ) -> dict[str, Any]:
        """For programs; ``figures`` are what each process has counted."""
        told, waiting = self.authority, waiting_for(self.reports)
        links = [
            {
                "from": report.node,
                "from_incarnation": report.incarnation,
                "to": line.node,
                "to_incarnation": line.incarnation,
                "address": line.address,
                "status": line.status,
                "reason": line.reason,
                "round_trip": line.round_trip,
                **link_facts(line.link),
            }
            for report in self.reports
            for line in report.peers
        ]
        return {
            "job": self.job,
            "state": told.state,
            "reason": told.reason,
            "lineage": told.lineage,
            "epoch": told.epoch,
            "leader": told.members[0].node if told.members else None,
            "nodes": [
                {
                    **node.as_dict(),
                    "radio": radio or None,
                    "figures": figures.get((node.node, node.incarnation), {}),
                }
                for node, radio in zip(self.nodes, radios_of(self.nodes), strict=True)
            ],
            "links": links,
            "waiting": None if waiting is None else waiting.as_dict(),
        }


def link_facts(link: LinkLine | None) -> dict[str, Any]:
    """What the map of a process says of a link, for programs; None for what was not measured."""
    known = link or LinkLine()
    is_timed, is_rated = bool(known.latency), bool(known.up or known.down)
    return {
        "latency": known.latency * 1e-9 if is_timed else None,
        "jitter": known.jitter * 1e-9 if is_timed else None,
        "loss": known.loss if is_timed else None,
        "latency_age": known.timed if is_timed else None,
        "latency_source": known.timed_by or None,
        "up": known.up or None,
        "down": known.down or None,
        "rate_age": known.rated if is_rated else None,
        "rate_source": known.rated_by or None,
        "is_local": known.is_local,
        "interface": known.interface or None,
    }


def radios_of(nodes: Sequence[NodeStatus]) -> tuple[int, ...]:
    """Which nodes share a radio: equal numbers from 1 on; 0 for the others."""
    media = [node.report.medium if node.report else None for node in nodes]
    told = [NodeProfile(medium=medium).air for medium in media]
    return sharing_air(told) or (0,) * len(nodes)


def jobs_of(reports: Iterable[StatusReport]) -> list[JobStatus]:
    """The jobs that processes work on, by name; launchers and observers are left out."""
    by_job: dict[str, list[StatusReport]] = {}
    for report in reports:
        if report.role == "member":
            by_job.setdefault(report.job, []).append(report)
    return [_job(job, found) for job, found in sorted(by_job.items())]


def builds_of(reports: Iterable[StatusReport]) -> dict[str, Build]:
    """What each machine runs, by name."""
    found = {each.name or each.node[:8]: each.build for each in reports}
    return {name: build for name, build in found.items() if build is not None}


def waiting_of(reports: Iterable[StatusReport]) -> list[dict[str, Any]]:
    """Who waits in ``potluck run`` for others, for programs."""
    return [
        {
            "job": report.job,
            "name": report.name or report.node[:8],
            "id": report.node,
            "address": f"{report.host}:{report.port}",
            "pid": report.pid,
            "state": report.state,
        }
        for report in reports
        if report.role == "launcher"
    ]


def waiting_for(reports: Iterable[StatusReport]) -> WaitingProcesses | None:
    """Which processes of one job wait for members of the last view, if any does."""
    waiting = [each for each in reports if each.role == "member" and each.missing]
    if not waiting:
        return None
    missing: dict[tuple[str, int], tuple[str, float]] = {}
    for line in (line for report in waiting for line in report.missing):
        key = line.node, line.incarnation
        silence = min(line.silence, missing[key][1]) if key in missing else line.silence
        missing[key] = line.name or line.node[:8], silence
    here = sorted({each.name or each.node[:8] for each in waiting})
    return WaitingProcesses(waiting[0].job, tuple(here), tuple(sorted(missing.values())))


def _duration(seconds: float) -> str:
    if seconds < _MINUTES:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < _HOURS else f"{seconds / 3600:.0f} h"


def story_of(
    namespace: str,
    job: str | None,
    found: Sequence[JobStatus],
    waiting: Iterable[Mapping[str, Any]],
    troubles: Mapping[str, str],
    foreigners: Iterable[str] = (),
    *,
    differing: Iterable[str] = (),
    has_network: bool = True,
) -> list[list[str]]:
    """Everything in sentences, in paragraphs: the command and the dashboard say the same.

    Without a network what is seen of others says nothing of them, and is left out.
    """
    paragraphs = [[f"{namespace}, {each.sentence}", *each.remarks] for each in found]
    calls = [
        f'"{each["job"]}": {each["name"]} at {each["address"]} waits in `potluck run` '
        "for the others."
        for each in waiting
    ]
    if not has_network:
        headlines = [[f"{namespace}, {each.headline}"] for each in found]
        return [*headlines, [*calls, NO_NETWORK]]
    calls += sorted(set(differing))[:MAX_TROUBLES]
    if not paragraphs and not calls:
        what = "No job" if job is None else f'No job "{job}"'
        calls = [
            f'{what} is running in "{namespace}".',
            *foreigners,
            "Start one with `potluck run`. If one should run, ask `potluck doctor`.",
        ]
    # One machine may be known by its name and by its addresses: the reason is told once.
    known = {why: who for who, why in sorted(troubles.items(), key=lambda each: ":" not in each[0])}
    shown = [f"{who} was seen but could not be reached: {why}" for why, who in known.items()]
    calls += sorted(shown)[:MAX_TROUBLES]
    if len(shown) > MAX_TROUBLES:
        calls.append(f"So were {len(shown) - MAX_TROUBLES} more.")
    return [*paragraphs, calls] if calls else paragraphs


def is_whole(reports: Sequence[StatusReport]) -> bool:
    """Whether every member that any report names has answered."""
    known = {report.key for report in reports}
    return all((each.node, each.incarnation) in known for r in reports for each in r.members)


def _job(job: str, reports: list[StatusReport]) -> JobStatus:
    authority = _authority(reports)
    by_key = {report.key: report for report in reports}
    health: dict[tuple[str, int], HealthLine] = {}
    for report in reports:
        for line in report.peers:
            key = line.node, line.incarnation
            if key not in health or _severity(line) > _severity(health[key]):
                health[key] = line
    ranked = [(each.node, each.incarnation) for each in authority.members]
    names = {(each.node, each.incarnation): each.name for each in authority.members}
    nodes = []
    for key in (*ranked, *(key for key in by_key if key not in ranked)):
        told, seen = by_key.get(key), health.get(key)
        name = (told.name if told else "") or names.get(key, "") or key[0][:8]
        rank = ranked.index(key) if key in ranked else None
        status, reason = (seen.status, seen.reason) if seen else ("healthy" if told else "", "")
        nodes.append(NodeStatus(rank, name, *key, told, status, reason))
    return JobStatus(job, authority, tuple(nodes), tuple(reports))


def _authority(reports: Sequence[StatusReport]) -> StatusReport:
    """Whose view counts; one who has not heard of the next view of its lineage knows less."""
    latest: dict[str, int] = {}
    for report in reports:
        latest[report.lineage] = max(report.epoch, latest.get(report.lineage, 0))
    return max(
        (report for report in reports if report.epoch == latest[report.lineage]),
        key=lambda each: (each.state == "active", len(each.members), each.epoch),
    )


def _severity(line: HealthLine) -> int:
    return _WORST.index(line.status) if line.status in _WORST else 0
