"""Observers: processes that look on and are never members, such as ``potluck status``.

An observer finds the processes of a namespace as members do, asks each how it is, and keeps the
answers.  A launcher is an observer that is found by others: launchers of one job ask each other.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from potluck.backend.port import NodePort
from potluck.closing import Closing
from potluck.core.cluster_cards import ProcessCard, Role
from potluck.errors import DistributedError, Timeout
from potluck.net.discovery import Advert, Discovery, job_tag
from potluck.runtime import clock
from potluck.runtime.control_doors import Doors
from potluck.runtime.control_errands import Errands
from potluck.runtime.control_links import REPORTS, Links
from potluck.runtime.control_port import make_card, open_port
from potluck.runtime.control_reports import (
    Ask,
    Continue,
    Report,
    bounded_facts,
    read_said,
    software_version,
    write,
)
from potluck.runtime.observing_chronicle import Chronicle
from potluck.runtime.observing_silence import SILENT_AFTER, Silence

if TYPE_CHECKING:
    from potluck.runtime.auto_config import AutoDiscoveryConfig
    from potluck.runtime.io_lane import Lane
    from potluck.vocabulary import ProcessId

__all__ = ["STARTING", "STOPPING", "Observer"]

STARTING, STOPPING = "starting", "stopping"
"""The last word of a launcher: its script begins now, at the same address; or does not."""

ASK_EVERY = 0.25
"""Seconds between two questions."""


class Observer(Closing):
    """Looks on; a context manager.

    With a ``job`` it looks at that job, otherwise at all of the namespace.  With ``facts`` it is a
    launcher: it can be found, and answers with them.  With ``journals`` it asks everybody for what
    happens as well, and keeps that in its :attr:`chronicle`.
    """

    def __init__(
        self,
        config: AutoDiscoveryConfig,
        *,
        job: str | None = None,
        facts: Mapping[str, str] | None = None,
        journals: bool = False,
    ) -> None:
        self.job = job
        self.chronicle = Chronicle()
        self._wants_journals = journals
        self._is_launcher = facts is not None
        self._facts = dict(facts or {})
        self._reports: dict[tuple[str, int], Report] = {}
        self._parted: dict[tuple[str, int], Report] = {}
        self._silence: Silence[Lane] = Silence()
        self._lock = threading.Lock()
        self._arrival = threading.Condition(self._lock)
        self._count = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = False
        self._state = "waiting"
        # Who only looks on is not looked for: the usual ports are left to those who are.
        at = config.port or 0
        self.port = (
            open_port(config)
            if self._is_launcher
            else NodePort(config.namespace, port=at, host=config.host)
        )
        namespace = self.port.members.security.namespace
        self.namespace = namespace
        self.card = make_card(self.port, config, Role.OBSERVER)
        self._errands = Errands()
        self._links = Links(self.card, self, self._errands, self._inbox.put)
        tag = "" if job is None else job_tag(namespace, job)
        links = self._links
        links.doors = Doors(self.port, job, self.card, links.opened, links.objection)
        advert = Advert.of(namespace, self.card.process, job=job or "", port=self.port.port)
        looking = config.discovery(announce=self._is_launcher)
        self._thread = threading.Thread(target=self._run, name="potluck-observer", daemon=True)
        self._thread.start()
        self._discovery = links.discovery = Discovery(
            replace(advert, job_tag=tag), looking, links.wake
        )
        links.wake()

    # -- any thread ----------------------------------------------------------------------------

    @property
    def reports(self) -> list[Report]:
        """What is known now: one report for each process that is connected, by name and start."""
        with self._lock:
            found = list(self._reports.values())
        return sorted(found, key=lambda each: (each.job, each.name, each.node, each.incarnation))

    @property
    def parted(self) -> list[Report]:
        """Launchers that have handed over to their scripts, or have given up."""
        with self._lock:
            return list(self._parted.values())

    @property
    def troubles(self) -> dict[str, str]:
        """Who was seen and could not be reached, and why; not of those of whom it is no news."""
        return self._links.contacts.troubles_except(self.chronicle.is_no_news)

    @property
    def foreigners(self) -> list[str]:
        """Who was heard and is of another namespace, as sentences."""
        return sorted({f"{each.is_elsewhere}." for each in self._discovery.foreigners})

    @property
    def unpaired(self) -> list[str]:
        """Machines that were heard and are of another namespace, as people recognise them."""
        return sorted({each.who for each in self._discovery.foreigners})

    @property
    def discovery_status(self) -> dict[str, str]:
        """In words, for each way of finding others: what it does, or why it cannot."""
        return self._discovery.status()

    def own_report(self) -> Report:
        """What this process tells those who ask."""
        return Report(
            node=self.card.node,
            incarnation=self.card.incarnation,
            name=self.card.name,
            host=self.card.hosts[0] if self.card.hosts else "",
            port=self.card.port,
            pid=os.getpid(),
            version=software_version(),
            role="launcher" if self._is_launcher else "observer",
            job=self.job or "",
            state=self._state,
            facts=bounded_facts(self._facts),
        )

    def tell(self, state: str, **facts: str) -> None:
        """Be in another state from now on, with other facts, and tell everybody at once."""
        if state != self._state or facts.items() - self._facts.items():
            self._state, self._facts = state, {**self._facts, **facts}
            self._inbox.put(self._tell_all)

    def ask_to_continue(self, job: str) -> None:
        """Have every process of a job that waits for missing machines continue without them."""
        self._inbox.put(lambda: self._send_all(Continue(job)))

    @property
    def addresses(self) -> list[str]:
        """Where the processes of this job that are connected can be reached."""
        found = {each.key for each in self.reports if each.job == self.job}
        lanes = list(self._links.observers.values())
        return [
            str(each.address)
            for each in lanes
            if each.card.port and (each.card.node, each.card.incarnation) in found
        ]

    @property
    def hosts(self) -> dict[tuple[str, int], str]:
        """By which address each process is connected with us, if it means the same elsewhere."""
        lanes = list(self._links.observers.values())
        return {
            (each.card.node, each.card.incarnation): each.address.host
            for each in lanes
            if "%" not in each.address.host
        }

    @property
    def news(self) -> int:
        """How often somebody has reported or gone so far."""
        return self._count

    def wait_for_news(self, since: int, timeout: float) -> int:
        """Wait until :attr:`news` is no longer ``since``, for so many seconds; what it is then."""
        with self._arrival:
            self._arrival.wait_for(lambda: self._count != since, max(0.0, timeout))
            return self._count

    def wait_until(self, condition: Callable[[list[Report]], bool], timeout: float) -> list[Report]:
        """The reports once they fulfil something; raises ``Timeout``."""
        deadline, news = time.monotonic() + timeout, self.news
        while not condition(reports := self.reports):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise Timeout("What was waited for did not happen in time", seconds=timeout)
            news = self.wait_for_news(news, remaining)
        return reports

    def close(self) -> None:
        """Leave; nobody minds."""
        if self._ended:
            return
        self._inbox.put(self._stop)
        self._thread.join(2.0)
        self._errands.close(0.0)
        self._links.io.close(0.5)
        self._discovery.close()
        self.port.close()
        self._errands.close(2.0)
        with contextlib.suppress(queue.Empty):
            while True:  # lanes that were opened too late
                self._inbox.get_nowait()()

    def _stop(self) -> None:
        self._ended = self._links.is_over = True

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        ask_at = 0.0
        while not self._ended:
            now = clock.now()
            if now >= ask_at:
                ask_at = now + ASK_EVERY
                self._ask_all()
            due = self._links.contacts.next_deadline
            until = ask_at if due is None else min(ask_at, due)
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=max(0.001, until - now))()
            if not self._ended:
                self._links.dial_due(clock.now())

    def _tell_all(self) -> None:
        self._send_all(self.own_report())

    def _send_all(self, message: Report | Continue) -> None:
        for lane in list(self._links.observers):
            self._links.io.send(lane, write(message), REPORTS)

    def _ask_all(self) -> None:
        lanes = self._links.observers
        for lane in lanes:
            self._ask(lane)
        for lane in self._silence.asked(lanes):
            self._disbelieve(lanes[lane].card.process)

    def _disbelieve(self, process: ProcessId) -> None:
        """What a silent member said last counts no more; launchers agree among themselves."""
        key = process.node, process.incarnation
        if getattr(self._reports.get(key), "role", "") == "member":
            self.lost(process, f"it has not answered for {SILENT_AFTER * ASK_EVERY:g} s")

    def _ask(self, lane: Lane) -> None:
        card = self._links.observer_behind(lane) if self._wants_journals else None
        after = -1 if card is None else self.chronicle.after((card.node, card.incarnation))
        with contextlib.suppress(DistributedError):
            self._links.io.send(lane, write(Ask(news_after=after)), REPORTS)

    # -- what the links tell -------------------------------------------------------------------

    def met(self, card: ProcessCard) -> None:
        """There is a lane to a process: ask at once."""
        for lane, opened in self._links.observers.items():
            if opened.card.process == card.process:
                self._ask(lane)

    def misbehaved(self, process: ProcessId, why: str) -> None:
        """An observer has nobody to remove: the lane is closed, and that is all."""

    def lost(self, process: ProcessId, cause: str) -> None:
        """There is none any more."""
        with self._lock:
            report = self._reports.pop((process.node, process.incarnation), None)
            self._count += 1
            self._arrival.notify_all()
            if report is not None and report.state in {STARTING, STOPPING}:
                self._parted[report.key] = report
        if report is not None:
            self.chronicle.parted(report, cause)

    def probed(self, process: ProcessId, what: str, *, has_ended: bool) -> None:
        """Never asked for."""

    def said(self, process: ProcessId, payload: bytes) -> None:
        """Not for observers."""

    def asked(self, lane: Lane, payload: bytes) -> None:
        """Somebody asks, or has answered."""
        said = read_said(payload)
        self._silence.answered(lane)
        if isinstance(said, Ask):
            self._links.io.send(lane, write(self.own_report()), REPORTS)
            return
        card = self._links.observer_behind(lane)
        if isinstance(said, Continue) or card is None or card.process != said.key:
            return
        if isinstance(said, Report):
            self.chronicle.arrived(said.key)
            with self._lock:
                self._reports[said.key] = said
                self._count += 1
                self._arrival.notify_all()
            return
        with self._lock:
            report = self._reports.get(said.key)
        if report is not None and self._wants_journals:
            self.chronicle.heard(report, said)
