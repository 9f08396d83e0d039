"""A clock that moves only when it is pushed, and a diary of what is due when.

Code that takes a clock as an argument can be given this one: a test of minutes then takes
milliseconds, and takes the same course every time.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any


class Appointment:
    """Something that is due at a moment of a :class:`VirtualClock`, unless it is cancelled."""

    __slots__ = ("action", "arguments", "number", "when")

    def __init__(
        self, when: float, number: int, action: Callable[..., object], arguments: tuple[Any, ...]
    ) -> None:
        self.when = when
        self.number = number  # those due at one moment keep the order in which they were made
        self.action: Callable[..., object] | None = action
        self.arguments = arguments

    def cancel(self) -> None:
        """Forget it.  Harmless when it has happened already."""
        self.action = None
        self.arguments = ()


def _appointed(appointment: Appointment) -> None:
    """Stands in a diary for something that can be cancelled."""
    raise AssertionError(appointment)  # step() does what was appointed


_Entry = tuple[float, int, Callable[..., object], tuple[Any, ...]]
"""When, the how-manieth, what, and with which arguments."""


class VirtualClock:
    """Seconds that pass when :meth:`advance` says so; call it like ``time.monotonic``.

    >>> clock = VirtualClock()
    >>> _ = clock.after(2.0, print, "the kettle boils")
    >>> clock.advance(1.5)
    >>> clock.advance(1.0)
    the kettle boils
    >>> clock()
    2.5
    """

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        self._diary: list[_Entry] = []
        self._count = 0

    def __call__(self) -> float:
        """The time, in seconds."""
        return self.now

    @property
    def next_due(self) -> float | None:
        """When the next thing is due; None if nothing is."""
        diary = self._diary
        while diary and diary[0][2] is _appointed and diary[0][3][0].action is None:
            heappop(diary)
        return diary[0][0] if diary else None

    def at(self, when: float, action: Callable[..., object], *arguments: Any) -> Appointment:
        """Call ``action(*arguments)`` at a moment; at once, in the next step, if it has passed."""
        when = max(when, self.now)
        appointment = Appointment(when, self._count + 1, action, arguments)
        self.post(when, _appointed, appointment)
        return appointment

    def post(self, when: float, action: Callable[..., object], *arguments: Any) -> None:
        """The same for what is never cancelled, at a moment that has not passed."""
        self._count = count = self._count + 1
        heappush(self._diary, (when, count, action, arguments))

    def after(self, seconds: float, action: Callable[..., object], *arguments: Any) -> Appointment:
        """Call ``action(*arguments)`` after this many seconds."""
        return self.at(self.now + seconds, action, *arguments)

    def step(self, until: float = inf) -> bool:
        """Jump to the next thing that is due and do it; False if nothing is until a moment."""
        diary = self._diary
        while diary:
            when, _, action, arguments = diary[0]
            if action is _appointed:
                appointment: Appointment = arguments[0]
                if appointment.action is None:
                    heappop(diary)
                    continue
                action, arguments = appointment.action, appointment.arguments
                if when > until:
                    return False
                appointment.action = None
            elif when > until:
                return False
            heappop(diary)
            self.now = when
            action(*arguments)
            return True
        return False

    def advance(self, seconds: float) -> None:
        """Let time pass, and do everything that becomes due, in order."""
        self.advance_to(self.now + seconds)

    def advance_to(self, moment: float) -> None:
        """Let time pass until a moment, and do everything that becomes due, in order."""
        while self.step(moment):
            pass
        self.now = max(self.now, moment)


class LocalClock:
    """A machine's own clock: it starts anywhere, may run fast or slow, leap ahead, or stand still.

    >>> clock = VirtualClock()
    >>> watch = LocalClock(clock, offset=100.0)
    >>> watch.drift(2.0)
    >>> clock.advance(1.0)
    >>> watch.now, watch.world_time(104.0)
    (102.0, 2.0)
    """

    __slots__ = ("_frozen_at", "_offset", "_rate", "_world")

    def __init__(self, world: VirtualClock, offset: float = 0.0) -> None:
        self._world = world
        self._offset = offset - world.now
        self._rate = 1.0  # seconds of this clock for each second of the world's
        self._frozen_at: float | None = None

    @property
    def now(self) -> float:
        """What it shows."""
        return self._offset + self._rate * self._world.now

    def world_time(self, shown: float) -> float:
        """When it will show this, if it continues as now."""
        return (shown - self._offset) / self._rate

    def jump(self, seconds: float) -> None:
        """Leap ahead."""
        self._offset += seconds

    def drift(self, rate: float) -> None:
        """Run faster (above 1) or slower (below 1) from now on."""
        self._offset += (self._rate - rate) * self._world.now
        self._rate = rate

    def freeze(self) -> None:
        """Stand still, as the monotonic clock of a suspended machine does."""
        self._frozen_at = self._world.now

    def thaw(self) -> None:
        """Continue from where it stood still, if it did."""
        if self._frozen_at is not None:
            self._offset -= self._rate * (self._world.now - self._frozen_at)
            self._frozen_at = None
