"""A network whose faults are drawn by lot from a seed: delay, loss, and cuts, one-way ones too.

It carries calls, not bytes: ``flow.send(action, argument)`` calls the action later, or never.  What
travels in one flow arrives in order, like in a connection; flows overtake each other freely.  A cut
stops at once what is under way.  Afterwards it arrives after all, as TCP would repeat it, or is
lost, as after a connection that ended: the caller says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from potluck.testing.clock import VirtualClock

HELD_MESSAGES = 256  # per direction of a cut link; what comes later has overflowed the outbox
WITHIN_A_MACHINE = 0.00005  # seconds


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """How a link treats what it carries."""

    shortest: float = 0.0002
    """Seconds that a message takes at least."""
    longest: float = 0.002
    """Seconds that a message takes at most."""
    loss: float = 0.0
    """The share of messages that never arrive, from 0 to 1."""

    def __post_init__(self) -> None:
        """Refuse impossible links."""
        if not 0 <= self.shortest <= self.longest or not 0 <= self.loss <= 1:
            msg = (
                f"A link takes from 0 seconds up, the shortest time first, and loses a share "
                f"between 0 and 1; this one would take {self.shortest} to {self.longest} seconds "
                f"and lose {self.loss}."
            )
            raise ValueError(msg)


class LossyNetwork:
    """Links between named machines, all alike until something is said about one of them.

    >>> clock = VirtualClock()
    >>> network = LossyNetwork(clock, Random(1))
    >>> post = network.flow("anna", "ben")
    >>> post.send(print, "hello")
    >>> clock.advance(1.0)
    hello
    >>> network.cut("anna", "ben")
    >>> post.send(print, "are you there?")
    >>> clock.advance(1.0)
    >>> network.heal("anna", "ben")
    >>> clock.advance(1.0)
    are you there?
    """

    def __init__(
        self, clock: VirtualClock, chance: Random, quality: LinkQuality | None = None
    ) -> None:
        self.clock = clock
        self.chance = chance
        self.quality = quality or LinkQuality()
        self._own: dict[tuple[str, str], LinkQuality] = {}
        self._cuts: dict[tuple[str, str], bool] = {}  # whether what is sent arrives afterwards
        self._changed_at: dict[tuple[str, str], float] = {}  # cut or mended
        self._held: dict[tuple[str, str], list[tuple[Flow, Callable[..., object], Any]]] = {}

    def flow(self, source: str, target: str) -> Flow:
        """A stream of messages from one machine to another, in order."""
        return Flow(self, source, target)

    def shape(self, source: str, target: str, quality: LinkQuality | None) -> None:
        """Give one direction of a link a quality of its own; None takes it back."""
        if quality is None:
            self._own.pop((source, target), None)
        else:
            self._own[source, target] = quality

    def shape_alike(self) -> None:
        """Take back every quality of its own."""
        self._own.clear()

    def cut(self, source: str, target: str, *, keep: bool = True) -> None:
        """Let nothing through in one direction; ``keep``: what is sent meanwhile arrives later."""
        self._cuts[source, target] = keep
        self._changed_at[source, target] = self.clock.now

    def heal(self, source: str, target: str) -> None:
        """Let everything through again."""
        if self._cuts.pop((source, target), None) is None:
            return
        self._changed_at[source, target] = self.clock.now
        for flow, action, argument in self._held.pop((source, target), []):
            flow.send(action, argument, certain=True)

    def separate(self, left: Iterable[str], right: Iterable[str], *, keep: bool = True) -> None:
        """Cut every link between two groups of machines, both ways."""
        others = tuple(right)
        for one in left:
            for other in others:
                self.cut(one, other, keep=keep)
                self.cut(other, one, keep=keep)

    def heal_all(self) -> None:
        """Mend every cut."""
        for source, target in tuple(self._cuts):
            self.heal(source, target)

    def reaches(self, source: str, target: str) -> bool:
        """Whether something sent now would get through, if it is not lost on the way."""
        return (source, target) not in self._cuts

    def is_open(self, one: str, other: str) -> bool:
        """Whether both directions let something through."""
        return (one, other) not in self._cuts and (other, one) not in self._cuts

    def is_steady(self, one: str, other: str, since: float) -> bool:
        """Whether both directions have been open for as long, and no worse than others."""
        return all(
            link not in self._cuts
            and link not in self._own
            and self._changed_at.get(link, since - 1) < since
            for link in ((one, other), (other, one))
        )

    def is_quick(self, longest: float) -> bool:
        """Whether all links carry everything, within this many seconds."""
        return not self._own and not self.quality.loss and self.quality.longest <= longest

    @property
    def cuts(self) -> tuple[tuple[str, str], ...]:
        """The directions that are cut."""
        return tuple(self._cuts)

    def delay(self, source: str, target: str) -> float:
        """The seconds that the next message would take."""
        if source == target:
            return WITHIN_A_MACHINE
        quality = self.quality_of((source, target)) if self._own else self.quality
        shortest = quality.shortest
        return shortest + (quality.longest - shortest) * self.chance.random()

    def quality_of(self, link: tuple[str, str]) -> LinkQuality:
        """How one direction of a link treats what it carries."""
        return self._own.get(link, self.quality)

    def loses(self, source: str, target: str) -> bool:
        """Draw whether the next message is lost."""
        quality = self.quality_of((source, target))
        return quality.loss > 0 and source != target and self.chance.random() < quality.loss

    def hold(self, flow: Flow, action: Callable[..., object], argument: Any) -> None:
        """Keep what ran into a cut until it is mended, or drop it."""
        link = flow.source, flow.target
        if self._cuts[link]:
            held = self._held.setdefault(link, [])
            if len(held) < HELD_MESSAGES:
                held.append((flow, action, argument))


class Flow:
    """What one sender sends to one receiver: it arrives in order, late, or not at all."""

    __slots__ = ("_latest", "_link", "_network", "source", "target")

    def __init__(self, network: LossyNetwork, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self._link = source, target
        self._network = network
        self._latest = 0.0  # when the last message arrives

    def send(self, action: Callable[..., object], argument: Any, *, certain: bool = False) -> None:
        """Call ``action(argument)`` when it arrives; ``certain``: no lot is drawn over its loss."""
        network, clock = self._network, self._network.clock
        quality = network.quality if not network._own else network.quality_of(self._link)  # noqa: SLF001
        if quality.loss and not certain and network.loses(self.source, self.target):
            return
        arrival = clock.now + network.delay(self.source, self.target)
        arrival = max(arrival, self._latest)
        self._latest = arrival
        clock.post(arrival, self._arrive, action, argument)

    def _arrive(self, action: Callable[..., object], argument: Any) -> None:
        if self._link in self._network._cuts:  # noqa: SLF001 - a flow is a part of its network
            self._network.hold(self, action, argument)
        else:
            action(argument)
