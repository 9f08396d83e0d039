"""Building the connections of a view, on a thread of its own, for as long as they are wanted."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from potluck.errors import DistributedError, from_os_error
from potluck.logs import get_logger
from potluck.runtime.cluster_group import ViewGroup

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.collective.config import CollectiveConfig
    from potluck.runtime.cluster_stage import Look, Stage
    from potluck.runtime.cluster_stages import Stages

__all__ = ["Builders", "Make", "clear_away"]

logger = get_logger(__name__)

BUILD_WITHIN, BUILD_EACH = 10.0, 0.5
"""Seconds for one attempt to connect all members of a view, and more for each of them.

Members may share one busy machine, and their handshakes with it.
"""

GRACE = 3.0
"""Seconds for what is under way when a view ends in good order.

A member that is slow needs them.  Who waits for one that has left is told at once; members that
wait for each other in vain are told after this time.
"""

PAUSE = 0.2
"""Seconds between two attempts."""


Make: TypeAlias = "Callable[[Stage, float, Look], Backend]"
"""Connects the members of a stage by a deadline; ``look`` raises when that is not wanted."""


class Builders:
    """Builds one stage after the other, and clears away those that are over."""

    def __init__(self, stages: Stages, make: Make, config: CollectiveConfig | None) -> None:
        self._stages = stages
        self._make = make
        self._config = config
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def build(self, stage: Stage, before: Stage | None) -> None:
        """Connect the members of a stage; afterwards clear away the one before it."""

        def work() -> None:
            try:
                self._build(stage)
            finally:
                if before is not None:
                    if before.is_orderly:
                        before.wait_until_unused(GRACE)
                    clear_away(before)

        self.start(work, f"potluck-view-{stage.view.epoch}")

    def abort(self, stage: Stage) -> None:
        """Interrupt what runs in a stage that has stopped, on a thread of its own.

        At once, unless no member was lost: then what is under way gets a moment to finish.  A rank
        with nothing under way ends its connections at once, so that no rank waits for it in vain.
        """

        def work() -> None:
            if stage.is_orderly:
                stage.wait_until_unused(GRACE)
            abort_stage(stage)

        if stage.backend is not None:
            self.start(work, f"potluck-abort-{stage.view.epoch}")

    def start(self, task: Callable[[], None], name: str) -> None:
        """Have something done on a short-lived thread; what goes wrong is logged."""

        def work() -> None:
            try:
                task()
            except Exception:
                logger.exception("%s failed", name)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:  # whoever closes waits for those that have started
            self._threads.add(thread)
            thread.start()

    def _build(self, stage: Stage) -> None:
        while not stage.stopped.is_set():
            try:
                within = BUILD_WITHIN + BUILD_EACH * stage.world_size
                backend = self._make(stage, time.monotonic() + within, stage.look)
            except (DistributedError, OSError) as error:
                words = error if isinstance(error, DistributedError) else _in_words(error)
                if not stage.stopped.is_set():
                    is_known, stage.trouble = str(stage.trouble) == str(words), words
                    level = logging.DEBUG if is_known else logging.INFO
                    logger.log(level, "view %d is not connected yet: %s", stage.view.epoch, words)
                stage.stopped.wait(PAUSE)
                continue
            group = ViewGroup(backend, stage, self._config)
            if not self._stages.built(stage, backend, group):
                stage.backend, stage.group = backend, group
                abort_stage(stage)
                clear_away(stage)
            return

    def close(self, within: float) -> None:
        """Wait for those at work; their stages must be over."""
        deadline = time.monotonic() + within
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def abort_stage(stage: Stage) -> None:
    """Interrupt what runs in a stage that has stopped."""
    backend = stage.backend
    if backend is None:
        return
    error = stage.ending or stage.stop_error
    abort: Callable[[DistributedError], None] | None = getattr(backend, "abort", None)
    if abort is not None:
        abort(error)


def clear_away(stage: Stage) -> None:
    """Close what a stage that is over had opened."""
    with contextlib.suppress(DistributedError, OSError):
        if stage.group is not None:
            stage.group.close()
    with contextlib.suppress(DistributedError, OSError):
        if stage.backend is not None:
            stage.backend.close()


def _in_words(error: OSError) -> DistributedError:
    return from_os_error("The members of the view could not be connected", error)
