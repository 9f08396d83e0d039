"""The demo's plot: form a group, train, kill a rank, let the others go on without it.

The director only gives orders and listens; bytes between ranks never pass through here.  Every wait
has a deadline, and a process that ends unasked ends the demo with an error that says so.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from potluck.apps.cli.demo_members import Event, Member, Standing, explain_end
from potluck.apps.cli.demo_messages import Failed, Finished, Form, Leave, Lost, Meeting, Progress
from potluck.apps.cli.demo_report import Killed, Noticed, Report
from potluck.core.handshake import list_ranks
from potluck.errors import DistributedError, Timeout

__all__ = ["Audience", "Director", "Settings"]

FORMING, NOTICING, LEAVING = 30.0, 10.0, 5.0
"""Seconds for processes to start and form a group, to notice a loss, and to end."""

REFRESH = 0.05
"""Seconds between two looks of the audience."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    ranks: int
    seconds: float
    """Time spent training; half of it before the kill."""
    victim: int
    seed: int


class Audience(Protocol):
    """Who watches."""

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """Something happened."""

    def show(self, members: Sequence[Standing], losses: Sequence[tuple[int, float]]) -> None:
        """This is how things stand; called often."""


class Director:
    """Runs the demo once."""

    def __init__(self, settings: Settings, audience: Audience) -> None:
        self._settings = settings
        self._audience = audience
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._losses: list[tuple[int, float]] = []
        self._members: list[Member] = []
        # Keys of its own, for a moment: the demo leaves no trace among those of this machine.
        self._home = tempfile.TemporaryDirectory(prefix="potluck-demo-")
        self._group: Sequence[Member] = ()  # by the rank they have at the moment
        self._gone: list[Member] = []  # those that may end: killed, or told to leave

    def __enter__(self) -> Self:
        """Start the processes."""
        try:
            for rank in range(self._settings.ranks):
                member = Member(rank, self._settings.seed, self._home.name, self._events)
                self._members.append(member)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End them, whatever happened."""
        self.close()

    def close(self) -> None:
        """End every process."""
        for member in self._members:
            member.kill()  # all of them first: no other waits for one that is slow to go
        for member in self._members:
            member.close()
        self._home.cleanup()

    def run(self) -> Report:
        """The whole plot."""
        settings, say = self._settings, self._audience.say
        host = socket.gethostname()
        say(f"{settings.ranks} processes on {host} train one model, each on its own points.")
        self._form(self._members, seconds=None)
        began = time.monotonic()
        while time.monotonic() < began + settings.seconds / 2:
            self._listen()
        victim = self._members[settings.victim]
        survivors = [member for member in self._members if member is not victim]
        killed, killed_at = self._kill(victim)
        noticed = self._await_notice(survivors, killed_at)
        step = self._form(survivors, seconds=settings.seconds / 2)
        resumed = time.monotonic() - killed_at
        ranks = list_ranks([member.rank for member in survivors])
        say(f"A new group of {ranks} goes on after step {step:,}.")
        finished = self._await_end(survivors)
        elapsed = time.monotonic() - began
        traffic = [member.progress for member in self._members if member.progress]
        return Report(
            ranks=settings.ranks,
            seed=settings.seed,
            pids=[member.pid for member in self._members],
            killed=killed,
            noticed=noticed,
            resumed_milliseconds=resumed * 1000,
            resumed_step=step,
            steps=finished[0].step,
            losses=self._losses,
            accuracy=finished[0].accuracy,
            fingerprints={
                str(member.rank): end.fingerprint
                for member, end in zip(survivors, finished, strict=True)
            },
            messages=sum(progress.messages for progress in traffic),
            bytes_sent=sum(progress.sent for progress in traffic),
            seconds=elapsed,
        )

    # -- the acts ------------------------------------------------------------------------------

    def _form(self, group: Sequence[Member], seconds: float | None) -> int:
        """Form a group and wait until it trains; returns the step it goes on from."""
        # Whoever has applied the most steps hands its state to the others: the sum of a step may
        # have reached some of them when a rank was lost, and not yet the rest.
        steps = [member.lost.step if member.lost else 0 for member in group]
        step = max(steps)
        self._group, first = group, group[0]
        first.meeting = None
        for rank, member in enumerate(group):
            if rank == 1:  # rank 0 says where the others find it
                self._await(group[:1], lambda first: first.meeting is not None, FORMING, "start")
            master = first.meeting.master if first.meeting else None
            source = steps.index(step)
            member.state = "joining"
            member.order(Form(rank, len(group), master, source, step, seconds))
        self._await(
            group,
            lambda member: member.progress is not None and member.progress.step > step,
            FORMING,
            "begin to train",
        )
        return step

    def _kill(self, victim: Member) -> tuple[Killed, float]:
        step = victim.progress.step if victim.progress else 0
        self._gone.append(victim)
        victim.state = "killed"
        sentence = f"Rank {victim.rank} (pid {victim.pid}) is killed at step {step:,}."
        self._audience.say(sentence, grave=True)
        now = time.monotonic()
        victim.kill()
        return Killed(victim.rank, victim.pid, step), now

    def _await_notice(self, survivors: Sequence[Member], killed_at: float) -> list[Noticed]:
        self._await(survivors, lambda member: member.lost is not None, NOTICING, "notice the loss")
        noticed = [
            Noticed(member.rank, (member.lost.at - killed_at) * 1000, member.lost.text)
            for member in survivors
            if member.lost
        ]
        self._audience.say(f"What rank {noticed[0].rank} sees: PeerLost: {noticed[0].text}")
        times = ", ".join(f"{it.rank} after {it.milliseconds:.1f} ms" for it in noticed)
        self._audience.say(f"Noticed by rank {times}.")
        return noticed

    def _await_end(self, survivors: Sequence[Member]) -> list[Finished]:
        limit = self._settings.seconds / 2 + FORMING
        self._await(survivors, lambda member: member.finished is not None, limit, "finish")
        self._gone += survivors
        for member in survivors:
            member.order(Leave())
        self._await(survivors, lambda member: member.ended, LEAVING, "end")
        return [member.finished for member in survivors if member.finished]

    # -- listening -----------------------------------------------------------------------------

    def _await(
        self, group: Sequence[Member], ready: Callable[[Member], bool], limit: float, what: str
    ) -> None:
        deadline = time.monotonic() + limit
        while missing := [member.rank for member in group if not ready(member)]:
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"{list_ranks(missing).capitalize()} did not {what} within {limit:g} s",
                    seconds=limit,
                    missing=missing,
                    rank=missing[0],
                    hint="This machine may be too busy; try fewer ranks.",
                )
            self._listen()

    def _listen(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._receive(*self._events.get(timeout=REFRESH))
            while True:
                self._receive(*self._events.get_nowait())
        self._audience.show(self._members, self._losses)

    def _receive(self, member: Member, news: object) -> None:
        match news:
            case Meeting():
                member.meeting = news
            case Progress():
                member.progress = news
                if member not in self._gone:  # a killed rank's last news may come after its end
                    member.state = "training"
                if not self._losses or news.step > self._losses[-1][0]:
                    self._losses.append((news.step, news.loss))
            case Finished():
                member.finished, member.state = news, "done"
            case Lost():
                member.lost, member.state = news, f"lost rank {news.rank}"
                self._check_meant(self._group[news.rank])
            case Failed():
                raise DistributedError(f"Rank {member.rank} of the demo failed", cause=news.text)
            case None:
                member.ended = True
                self._check_meant(member)

    def _check_meant(self, ended: Member) -> None:
        if ended not in self._gone:
            raise explain_end(ended)
