"""The watcher: looks at a namespace a few times a second, and hands what it sees to the page."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from potluck.apps.dashboard.gauges import Gauges
from potluck.apps.dashboard.picture import Scene, draw, draw_news, lately_gone, lighten
from potluck.closing import Closing
from potluck.logs import get_logger
from potluck.runtime.observing import Observer

if TYPE_CHECKING:
    from potluck.apps.dashboard.broadcast import Broadcast
    from potluck.runtime.auto_config import AutoDiscoveryConfig
    from potluck.runtime.control_reports import Report

__all__ = ["Watcher"]

logger = get_logger(__name__)

LOOK_EVERY = 0.25
"""Seconds between two looks: as often as everybody is asked."""

MANY = 32
"""Processes; of so many more, each look comes that much later: pictures grow with their number."""

TELL_EVERY = 1.0
"""Seconds after which the page is told that nothing has changed: its clocks go on."""


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
        gone = [each.report for each in lately_gone(observer.chronicle, now)]
        self._gauges.keep((each.key for each in reports), {each.job for each in (*reports, *gone)})
        picture = draw(
            Scene(
                namespace=observer.namespace.name,
                job=observer.job,
                reports=reports,
                troubles=observer.troubles,
                foreigners=observer.foreigners,
                discovery=observer.discovery_status,
                chronicle=observer.chronicle,
                gauges=self._gauges,
                now=now,
            )
        )
        changed = {**picture, "time": 0}
        if changed != self._told or now - self._told_at >= TELL_EVERY or now < self._told_at:
            self._told, self._told_at = changed, now
            whole, light = msgspec.json.encode(picture), msgspec.json.encode(lighten(picture))
            self._broadcast.show(whole, light)
        for each in observer.chronicle.news(self._broadcast.last_number):
            self._broadcast.tell(each.number, msgspec.json.encode(draw_news([each])[0]))

    def _measure(self, reports: Sequence[Report], now: float) -> None:
        journals = self.observer.chronicle.journals
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
