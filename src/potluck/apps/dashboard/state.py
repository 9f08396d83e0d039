"""The picture: what the page shows, made of what observers know; plain data, no page in it.

Sentences are those of ``potluck status``, which are those of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from potluck._process import Closing
from potluck._types import LinkMatrix
from potluck.apps.cli.status_facts import (
    JobStatus,
    NodeStatus,
    jobs_of,
    link_facts,
    story_of,
    waiting_of,
)
from potluck.cluster.observer import GoneProcess, ObservedEvent, ObservedHistory, Observer
from potluck.cluster.reports import EpochLine, Journal, StatusReport
from potluck.logs import get_logger

if TYPE_CHECKING:
    from potluck.cluster.config import AutoDiscoveryConfig


# --------------------------------------------------------------------------------------------------
# The links of a job as its members measured them, and the shortest way round them.

MAX_LINKS = 600
"""Links in one picture: all of 25 nodes.  Of a hundred there are ten thousand."""

LARGEST = (1 << 32) - 1
"""Nanoseconds that a link matrix can hold."""


def name_key(key: Key) -> str:
    """A process, in one word."""
    return f"{key[0]}/{key[1]}"


def links_of(
    job: JobStatus, journals: Mapping[Key, Journal], ring: Sequence[str]
) -> list[dict[str, Any]]:
    """Every link as each of its ends sees it; of very many, those of the ring and the bad ones."""
    found = _all_links(job, journals)
    if len(found) <= MAX_LINKS:
        return found
    after = dict(zip(ring, [*ring[1:], *ring[:1]], strict=True))
    kept = [
        each
        for each in found
        if each["status"] != "healthy" or after.get(each["from"]) == each["to"]
    ]
    return kept[:MAX_LINKS]


def _all_links(job: JobStatus, journals: Mapping[Key, Journal]) -> list[dict[str, Any]]:
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
                    **link_facts(line.link),
                    **({"latency": latency * 1e-9} if latency else {}),
                }
            )
    return found


def ring_of(job: JobStatus, journals: Mapping[Key, Journal]) -> list[str]:
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
    from potluck.schedule.planner import Planner

    return tuple(Planner(matrix).ring)


# --------------------------------------------------------------------------------------------------
# Gauges: rates and curves, from counters that processes tell now and then.
#
# A counter says how much there was since a process began; what people want to see is how much there
# is now, and how it went.  Bounded: a few minutes of each process, a few hundred points of each
# loss.

EVERY = 1.0
"""Seconds between two points of a curve."""

KEPT = 300
"""Points of each process: five minutes."""

MAX_CURVE = 512
"""Points of a loss: when there are more, every second one is dropped."""

JITTER = 10
"""Steps by which those who are asked at the same moment may differ."""

MAX_PROCESSES = 160
"""Processes with curves; of more, the last ones heard."""

GaugeKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """How a process did within one second or so."""

    time: float
    throughput: float
    """Bytes of arrays per second that its collectives took."""
    waiting: float
    """Share of the time that it slept because the bytes of others were missing, 0 to 1."""

    def as_list(self) -> list[float]:
        """For the page, in few characters."""
        return [round(self.time, 1), round(self.throughput), round(self.waiting, 4)]


@dataclass(slots=True)
class _Curve:
    """The loss of a job by its steps; thinner when it is long."""

    points: list[list[float]] = field(default_factory=list)
    stride: int = 1

    def add(self, step: float, loss: float) -> None:
        if self.points and step < self.points[-1][0] - JITTER:  # it goes on from an earlier state
            self.points, self.stride = [point for point in self.points if point[0] < step], 1
        if self.points and step < self.points[-1][0] + self.stride:
            return
        self.points.append([step, loss])
        if len(self.points) > MAX_CURVE:
            self.points = self.points[::2]
            self.stride = max(1, int(self.points[-1][0] - self.points[-2][0]))


class Gauges:
    """Rates and curves of all processes and jobs."""

    def __init__(self) -> None:
        self._samples: dict[GaugeKey, deque[Sample]] = {}
        self._last: dict[
            GaugeKey, tuple[float, float, float]
        ] = {}  # time, bytes, seconds of waiting
        self._losses: dict[str, _Curve] = {}

    def note(self, key: GaugeKey, figures: Mapping[str, float], now: float) -> None:
        """A process has told its counters."""
        moved, waited = figures.get("collectives.bytes"), figures.get("waiting.total")
        if moved is None and waited is None:
            return
        current = (now, moved or 0.0, waited or 0.0)
        before = self._last.get(key)
        if before is not None and now - before[0] < EVERY:
            return
        self._last[key] = current
        if before is not None:
            seconds = now - before[0]
            throughput = max(0.0, current[1] - before[1]) / seconds
            waiting = min(1.0, max(0.0, current[2] - before[2]) / seconds)
            samples = self._samples.setdefault(key, deque(maxlen=KEPT))
            samples.append(Sample(now, throughput, waiting))

    def note_loss(self, job: str, step: float, loss: float) -> None:
        """Some process of a job has told its loss."""
        self._losses.setdefault(job, _Curve()).add(step, loss)

    def keep(self, keys: Iterable[GaugeKey], jobs: Iterable[str]) -> None:
        """Forget all others."""
        wanted, named = set(keys), set(jobs)
        for book in (self._samples, self._last):
            for key in [each for each in book if each not in wanted]:
                del book[key]
            while len(book) > MAX_PROCESSES:
                del book[next(iter(book))]
        for job in [each for each in self._losses if each not in named]:
            del self._losses[job]

    def samples(self, key: GaugeKey) -> list[Sample]:
        """The last minutes of a process, oldest first."""
        return list(self._samples.get(key, ()))

    def loss(self, job: str) -> list[list[float]]:
        """Step and loss, in order."""
        curve = self._losses.get(job)
        return [] if curve is None else list(curve.points)


# --------------------------------------------------------------------------------------------------

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
class DashboardState:
    """What is known at one moment."""

    namespace: str
    job: str | None
    reports: Sequence[StatusReport]
    troubles: Mapping[str, str]
    discovery: Mapping[str, str]
    history: ObservedHistory
    gauges: Gauges
    now: float
    foreigners: Sequence[str] = ()
    """What is seen of machines in other namespaces, in words."""
    has_network: bool = True
    differing: Mapping[str, str] = field(default_factory=dict)
    """Machines of versions with which no work is possible."""


def draw(scene: DashboardState) -> dict[str, Any]:
    """The whole picture."""
    found, waiting = jobs_of(scene.reports), waiting_of(scene.reports)
    story = story_of(
        scene.namespace,
        scene.job,
        found,
        waiting,
        scene.troubles,
        scene.foreigners,
        has_network=scene.has_network,
        differing=scene.differing.values(),
    )
    journals = scene.history.journals
    gone = lately_gone(scene.history, scene.now)
    jobs = [_job(scene, each, journals, gone) for each in found]
    jobs += [_ended_job(scene, each, gone) for each in ended_jobs(found, gone)]
    return {
        "namespace": scene.namespace,
        "time": round(scene.now, 2),
        "story": story,
        "jobs": jobs,
        "waiting": waiting,
        "unreachable": dict(scene.troubles),
        "other_versions": dict(scene.differing),
        "discovery": dict(scene.discovery),
    }


def lately_gone(history: ObservedHistory, now: float) -> list[GoneProcess]:
    """Members that are gone and still shown."""
    return [
        each
        for each in history.gone
        if each.report.role == "member" and now - each.time < SHOWN_FOR
    ]


def ended_jobs(found: Sequence[JobStatus], gone: Sequence[GoneProcess]) -> list[str]:
    """Jobs that have ended, by name; their last state is still shown."""
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


def draw_news(news: Sequence[ObservedEvent]) -> list[dict[str, Any]]:
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
    scene: DashboardState,
    job: JobStatus,
    journals: Mapping[Key, Journal],
    gone: Sequence[GoneProcess],
) -> dict[str, Any]:
    epochs = scene.history.epochs(job.job)
    nodes = [_node(scene, each, journals) for each in job.nodes]
    nodes += [_gone_node(each, epochs) for each in _unreplaced(scene.history, job, gone)]
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


def _unreplaced(
    history: ObservedHistory, job: JobStatus, gone: Sequence[GoneProcess]
) -> list[GoneProcess]:
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
                if key[0] == node and key[1] > incarnation and history.since(key) > each.time
            ),
            None,
        )
        if instead is None:
            found.append(each)
        else:
            later.remove(instead)  # it stands for one
    return found


def _ended_job(scene: DashboardState, job: str, gone: Sequence[GoneProcess]) -> dict[str, Any]:
    """What is left of a job: who worked on it, in which views, and how far it came."""
    epochs = scene.history.epochs(job)
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


def _node(
    scene: DashboardState, node: NodeStatus, journals: Mapping[Key, Journal]
) -> dict[str, Any]:
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
    """The rank for which a process has waited longest; None if it has not waited."""
    waited = {
        int(rank): seconds
        for name, seconds in figures.items()
        if (rank := name.removeprefix("waiting.")) != name and _is_rank(rank) and seconds > 0
    }
    return max(waited, key=lambda rank: waited[rank], default=None)


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS


def _gone_node(gone: GoneProcess, epochs: Sequence[EpochLine]) -> dict[str, Any]:
    """A process that was here, with the reason with which the others continued."""
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


# --------------------------------------------------------------------------------------------------
# The watcher: looks at a namespace a few times a second, and hands what it sees to the page.

logger = get_logger(__name__)

LOOK_EVERY = 0.25
"""Seconds between two looks: as often as everybody is asked."""

MANY = 32
"""Processes; for each further group of this size, pictures come one interval later."""

TELL_EVERY = 1.0
"""Seconds after which the page is told that nothing has changed, for its clocks."""


class Watcher(Closing):
    """Observes until it is closed; a context manager.  Has a thread of its own."""

    def __init__(
        self, config: AutoDiscoveryConfig, broadcast: Broadcast, *, job: str | None = None
    ) -> None:
        self._broadcast = broadcast
        self._gauges = Gauges()
        self._over = threading.Event()
        self._told: dict[str, object] = {}
        self._told_at = 0.0
        self.observer = Observer(config, job=job, journals=True)
        self._look()  # whoever asks first sees something
        self._thread = threading.Thread(target=self._run, name="potluck-watcher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY * (1 + len(self.observer.reports) // MANY)):
            try:
                self._look()
            except Exception:  # a picture that cannot be drawn must not end the dashboard
                logger.exception("The dashboard could not draw what it saw")

    def _look(self) -> None:
        observer, now = self.observer, time.time()
        reports = [each for each in observer.reports if each.role != "observer"]
        self._measure(reports, now)
        gone = [each.report for each in lately_gone(observer.history, now)]
        self._gauges.keep((each.key for each in reports), {each.job for each in (*reports, *gone)})
        picture = draw(
            DashboardState(
                namespace=observer.namespace.name,
                job=observer.job,
                reports=reports,
                troubles=observer.troubles,
                foreigners=observer.foreigners,
                has_network=observer.has_network,
                differing=observer.differing,
                discovery=observer.discovery_status,
                history=observer.history,
                gauges=self._gauges,
                now=now,
            )
        )
        changed = {**picture, "time": 0}
        if changed != self._told or now - self._told_at >= TELL_EVERY or now < self._told_at:
            self._told, self._told_at = changed, now
            whole, light = msgspec.json.encode(picture), msgspec.json.encode(lighten(picture))
            self._broadcast.show(whole, light)
        for each in observer.history.news(self._broadcast.last_number):
            self._broadcast.tell(each.number, msgspec.json.encode(draw_news([each])[0]))

    def _measure(self, reports: Sequence[StatusReport], now: float) -> None:
        journals = self.observer.history.journals
        told: dict[str, list[tuple[float, float]]] = {}
        for report in reports:
            figures = journals[report.key].figures if report.key in journals else {}
            self._gauges.note(report.key, figures, now)
            step, loss = figures.get("training.step"), figures.get("training.loss")
            if step is not None and loss is not None:
                told.setdefault(report.job, []).append((step, loss))
        for job, points in told.items():  # of samples of their own each: their mean is the job's
            mean = sum(loss for _, loss in points) / len(points)
            self._gauges.note_loss(job, max(step for step, _ in points), mean)

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join(5.0)
        self.observer.close()


# --------------------------------------------------------------------------------------------------
# The broadcast: one picture for many viewers, as server-sent events.
#
# The watcher's thread leaves the latest picture and the latest news here and goes on; nobody waits
# for a viewer.  Each viewer takes what it has not seen when it is ready for it: a slow one skips
# pictures, and of the news it misses no more than is kept.  What waits for a viewer is one message.

MAX_VIEWERS = 16
"""Pages that are open at once."""

BROADCAST_KEPT = 400
"""News that a page which comes back can catch up with."""

HEARTBEAT = 5.0
"""Seconds of silence after which something is said, so that a broken connection is noticed."""

RETRY = 1000
"""Milliseconds after which a page that lost its connection tries again."""


BROADCAST_MAX_DIGITS = 18
"""Of a number that a page may name."""


class Seen(NamedTuple):
    """What a viewer has seen: the picture of this version, and the news up to this number."""

    version: int
    number: int


class TooManyViewers(Exception):
    """As many look on as may."""


class Broadcast:
    """What is shown now, and what happened; any thread shows, viewers live in an event loop."""

    def __init__(self) -> None:
        self.start = secrets.token_hex(4)
        """Names this start of the dashboard: numbers of another one mean nothing here."""
        self._lock = threading.Lock()
        self._whole = self._light = b"{}"
        self._version = 0
        self._news: deque[tuple[int, bytes]] = deque(maxlen=BROADCAST_KEPT)
        self._viewers: dict[Viewer, asyncio.AbstractEventLoop] = {}
        self._is_over = False

    # -- any thread ----------------------------------------------------------------------------

    def show(self, whole: bytes, light: bytes) -> None:
        """The picture has changed; ``light`` is for those who have seen an earlier one."""
        with self._lock:
            self._whole, self._light = whole, light
            self._version += 1
        self._wake()

    def tell(self, number: int, news: bytes) -> None:
        """Something happened."""
        with self._lock:
            self._news.append((number, news))
        self._wake()

    @property
    def last_number(self) -> int:
        """Of the latest news."""
        with self._lock:
            return self._news[-1][0] if self._news else 0

    @property
    def picture(self) -> bytes:
        """The whole picture as it is now."""
        with self._lock:
            return self._whole

    @property
    def news(self) -> bytes:
        """All news that are kept, as one list."""
        with self._lock:
            return b"[" + b",".join(news for _, news in self._news) + b"]"

    def close(self) -> None:
        """Let every viewer go."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            viewers = list(self._viewers.items())
        for viewer, loop in viewers:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(viewer.wake)

    # -- in the event loop ---------------------------------------------------------------------

    def admit(self) -> Viewer:
        """One more viewer; raises ``TooManyViewers``."""
        viewer = Viewer(self)
        with self._lock:
            if len(self._viewers) >= MAX_VIEWERS:
                raise TooManyViewers
            self._viewers[viewer] = asyncio.get_running_loop()
        return viewer

    def dismiss(self, viewer: Viewer) -> None:
        """One viewer less."""
        with self._lock:
            self._viewers.pop(viewer, None)

    @property
    def viewers(self) -> int:
        """How many look on."""
        with self._lock:
            return len(self._viewers)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to see."""
        return self._is_over

    def unseen(self, seen: Seen) -> tuple[bytes, Seen]:
        """What a page has not seen yet, as events, and what it has seen then."""
        with self._lock:
            version, number = self._version, seen.number
            parts = []
            if seen.version < 0:
                parts.append(
                    b"retry: %d\n" % RETRY + _event("whole", self._mark(number), self._whole)
                )
            elif version != seen.version:
                parts.append(_event("light", self._mark(number), self._light))
            for number, news in [each for each in self._news if each[0] > seen.number]:
                parts.append(_event("news", self._mark(number), news))
        return b"".join(parts), Seen(version, number)

    def _mark(self, number: int) -> str:
        return f"{self.start}.{number}"

    def number_of(self, mark: str) -> int:
        """The news after which a page was cut off, by what it says; 0 if that is not of here."""
        start, _, number = mark.partition(".")
        is_ours = start == self.start and number.isascii() and number.isdecimal()
        return int(number) if is_ours and len(number) < BROADCAST_MAX_DIGITS else 0


class Viewer:
    """One page that looks on."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._woken = asyncio.Event()
        self._is_gone = False

    def wake(self) -> None:
        """There may be something to see; in the event loop."""
        self._woken.set()

    def leave(self) -> None:
        """It looks no more; in the event loop."""
        self._is_gone = True
        self._broadcast.dismiss(self)
        self.wake()

    async def messages(self, mark: str = "") -> AsyncIterator[bytes]:
        """Events, for as long as it looks; ``mark`` is that of the last event it has had before."""
        seen = Seen(-1, self._broadcast.number_of(mark))
        while not self._is_gone and not self._broadcast.is_over:
            self._woken.clear()
            message, seen = self._broadcast.unseen(seen)
            if message:
                yield message
                continue
            try:
                async with asyncio.timeout(HEARTBEAT):
                    await self._woken.wait()
            except TimeoutError:
                yield b": still here\n\n"


def _event(kind: str, mark: str, data: bytes) -> bytes:
    """A server-sent event; JSON has no line breaks."""
    return b"event: %s\nid: %s\ndata: %s\n\n" % (kind.encode(), mark.encode(), data)
