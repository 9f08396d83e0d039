"""Shares: how much of a batch each member takes, so that all finish at the same time.

Speeds are whole numbers that the members have told each other, so all come to the same shares.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from potluck.identity.node import machine_name
from potluck.logs import get_logger
from potluck.training.averaging import StepContribution
from potluck.training.sampler import divided

UNKNOWN = 0
"""The speed of a member that has not measured yet."""

SMOOTHING = 0.3
"""How much of a new measurement counts: one odd step changes little, three change most."""


SHORTEST = 0.005
"""Seconds of computing below which nothing is learned: it is mostly chance, and hardly matters."""


def shares_of(batch: int, speeds: Sequence[int]) -> list[int]:
    """Divide a batch by speed; everybody gets at least one sample while there are enough.

    A member that has not measured yet counts as an average one.

    >>> shares_of(130, [400, 400, 400, 100]), shares_of(9, [0, 300, 300])
    ([40, 40, 40, 10], [3, 3, 3])
    """
    known = [speed for speed in speeds if speed > UNKNOWN]
    average = sum(known) // len(known) if known else 1
    weights = [speed if speed > UNKNOWN else average for speed in speeds]
    if batch <= len(weights):
        return [1] * batch + [0] * (len(weights) - batch)
    shares = divided(batch, weights)
    while 0 in shares:  # a slow one must keep measuring, or it stays slow for ever
        shares[shares.index(0)] = 1
        shares[shares.index(max(shares))] -= 1
    return shares


class Speedometer:
    """Samples per second of this member, from what it did and how long that took."""

    def __init__(self) -> None:
        self._rate: float | None = None

    def note(self, samples: int, seconds: float) -> None:
        """These samples took this long; too few teach nothing."""
        if samples < 1 or seconds < SHORTEST:
            return
        rate = samples / seconds
        before = self._rate
        self._rate = rate if before is None else before + SMOOTHING * (rate - before)

    @property
    def speed(self) -> int:
        """In thousandths of a sample per second, to be told to the others."""
        return UNKNOWN if self._rate is None else max(1, min(1 << 62, round(self._rate * 1000)))


@dataclass(frozen=True, slots=True)
class Straggler:
    """A member that holds up the others, and why."""

    rank: int
    factor: float
    """How many times slower than the median of the others it is."""
    cause: str
    remedy: str = "It gets a smaller share of each batch."
    name: str = ""
    """What its machine is called."""

    def __str__(self) -> str:
        """One sentence."""
        who = f"{self.name} (rank {self.rank})" if self.name else f"Rank {self.rank}"
        return f"{who} is {self.factor:.1f} times slower than the others: {self.cause}"


@dataclass(frozen=True, slots=True)
class MemberCondition:
    """What a member knows of itself, in whole numbers."""

    load: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    """Percent of its processors that others than this training use."""
    on_battery: bool = False
    heat: Annotated[int, msgspec.Meta(ge=-300, le=10_000)] = 0
    """Degrees Celsius; 0 where that is not known."""
    link: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    """Bytes per second it can send; 0 where that is not known."""
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """What its machine is called."""


BUSY, HOT, SLOW = 50, 90, 2.0
"""Percent of foreign load, degrees, and times slower that are worth a warning."""


def find_straggler(
    speeds: Sequence[int], conditions: Sequence[MemberCondition]
) -> Straggler | None:
    """The slowest member, if it is much slower than the others, with its likely cause.

    >>> fine, busy = MemberCondition(), MemberCondition(load=80)
    >>> str(find_straggler([400, 400, 100], [fine, fine, busy]))
    'Rank 2 is 4.0 times slower than the others: other programs use 80 % of its CPU'
    """
    if len(speeds) < 2 or UNKNOWN in speeds:  # noqa: PLR2004 - nothing to compare with
        return None
    rank = min(range(len(speeds)), key=lambda each: speeds[each])
    others = sorted(speed for place, speed in enumerate(speeds) if place != rank)
    factor = others[len(others) // 2] / speeds[rank]
    if factor < SLOW:
        return None
    return Straggler(rank, factor, _cause(rank, conditions), name=conditions[rank].name)


WORTH_SAYING = 0.25
"""Part of a step's time that a slow link must cost before anybody is told."""


def find_slow_link(
    conditions: Sequence[MemberCondition], nbytes: int, seconds: float
) -> Straggler | None:
    """The member whose link holds up the averaging, if a step of this length shows that.

    A slow processor does not make a slow link: what counts is the rate that was measured on it.

    >>> links = [MemberCondition(link=rate) for rate in (100_000_000, 120_000_000, 2_000_000)]
    >>> str(find_slow_link(links, nbytes=4_000_000, seconds=2.5))
    'Rank 2 is 60.0 times slower than the others: its link is slow (2.0 MB/s)'
    """
    known = [(each.link, rank) for rank, each in enumerate(conditions) if each.link]
    if len(known) < 2:  # noqa: PLR2004 - nothing to compare with
        return None
    (rate, rank), *others = sorted(known)
    typical = others[len(others) // 2][0]
    if typical < SLOW * rate or nbytes / rate < WORTH_SAYING * seconds:
        return None
    remedy = "LocalSgd and compression send fewer bytes; a cable is faster."
    name = conditions[rank].name
    return Straggler(rank, typical / rate, _slow_link(rate), remedy, name)


def _slow_link(rate: int) -> str:
    return f"its link is slow ({rate / 1e6:.1f} MB/s)"


def _cause(rank: int, conditions: Sequence[MemberCondition]) -> str:
    mine = conditions[rank]
    others = [each.link for place, each in enumerate(conditions) if place != rank and each.link]
    if mine.heat >= HOT:
        return f"it is hot ({mine.heat} °C) and throttles itself"
    if mine.on_battery:
        return "it runs on battery"
    if mine.load >= BUSY:
        return f"other programs use {mine.load} % of its CPU"
    if mine.link and others and mine.link * SLOW < min(others):
        return _slow_link(mine.link)
    return "its processor is slower"


# --------------------------------------------------------------------------------------------------
# How this machine is: what may make it slower than it could be.


def measure_condition(link: int = 0) -> MemberCondition:
    """Load by others, battery and heat, as far as this machine tells; ``link`` in bytes per second.

    >>> measure_condition(link=125_000_000).link
    125000000
    """
    import psutil

    return MemberCondition(
        load=_foreign_load(psutil),
        on_battery=_on_battery(psutil),
        heat=_heat(psutil),
        link=link,
        name=machine_name(),
    )


def _foreign_load(psutil: Any) -> int:
    """Percent of the processors that others than this process have used since the last look."""
    own = float(_this_process(os.getpid()).cpu_percent(None)) / (psutil.cpu_count() or 1)
    return round(min(100.0, max(0.0, float(psutil.cpu_percent(None)) - own)))


@functools.cache
def _this_process(pid: int) -> Any:
    """The same object every time: it remembers what it saw last."""
    import psutil

    return psutil.Process(pid)


def _on_battery(psutil: Any) -> bool:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


def _heat(psutil: Any) -> int:
    """Of the hottest sensor; 0 where there is none, as on macOS and in virtual machines."""
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    found = [float(each.current) for row in sensors.values() for each in row if each.current]
    return round(max(found, default=0.0))


# --------------------------------------------------------------------------------------------------
# Pace: how fast each member is, who holds up the others, and what each takes of a batch.

logger = get_logger(__name__)

LASTING = 5
"""Steps for which a member has been slower before it is named."""

AGAIN = 1000
"""Steps before the same member is named again."""


class MemberSpeeds:
    """What a member knows of all members' speeds; the same on all of them.

    ``tell`` gets a warning about a slow member as well, for those who look on.
    """

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self.meter = Speedometer()
        """This member's own."""
        self.speeds: tuple[int, ...] = ()
        self.conditions: tuple[MemberCondition, ...] = ()
        self.straggler: Straggler | None = None
        """The member that is much slower than the others, if there is one, and likely why."""
        self._tell = tell
        self._steps = 0
        self._named: dict[str | int, int] = {}  # after which step each was named last
        self._suspects: list[int] = []  # who was much slower in each of the last steps, or -1

    def note(
        self, records: Sequence[StepContribution], rates: Sequence[int] = (), nbytes: int = 0
    ) -> None:
        """What members have told with a step that counts, in which this many bytes were averaged.

        ``rates`` are those of their links, in bytes per second.
        """
        self._steps += 1
        self.speeds = tuple(record.speed for record in records)
        if len(self.conditions) != len(self.speeds):
            return  # of a view that is over
        if len(rates) == len(self.speeds):
            self.conditions = tuple(
                replace(each, link=rate) for each, rate in zip(self.conditions, rates, strict=True)
            )
        found = find_straggler(self.speeds, self.conditions)
        found = found or find_slow_link(self.conditions, nbytes, self._seconds(records, nbytes))
        self._suspects = [*self._suspects[1 - LASTING :], -1 if found is None else found.rank]
        if found is not None and self._suspects != [found.rank] * LASTING:
            found = None  # once is chance
        if found is not None and self.straggler is None:
            self._warn(found)
        self.straggler = found

    def _seconds(self, records: Sequence[StepContribution], nbytes: int) -> float:
        """How long a step takes, by what all know: all come to the same conclusion."""
        computing = [1000 * each.weight / each.speed for each in records if each.speed]
        links = [nbytes / each.link for each in self.conditions if each.link]
        return max(computing, default=0.0) + max(links, default=0.0)

    def _warn(self, found: Straggler) -> None:
        """Name a slow member; one that is slow now and then is not named each time."""
        who = found.name or found.rank
        if self._steps - self._named.get(who, -AGAIN) < AGAIN:
            return
        self._named[who] = self._steps
        sentence = f"{found}. {found.remedy}"
        logger.warning("%s", sentence)
        self._tell(sentence)

    def counts(self, batch: int, size: int) -> list[int]:
        """How many samples of a batch each of this many members takes."""
        return shares_of(batch, self.speeds if len(self.speeds) == size else (0,) * size)
