"""Barriers of all groups of one rank: drives :class:`potluck.core.barrier.Barrier`.

Tokens are handled by whichever thread runs the pump, so the rounds of a barrier follow each other
without waking anybody in between.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from potluck.backend.operation import Cancelled, Driver, Operation, finish_all
from potluck.core.barrier import Announce, Barrier, Effect, Failed, Token
from potluck.errors import DistributedError, InvalidRank, MalformedFrame, Timeout
from potluck.net.frames import Header, Kind

__all__ = ["BarrierWait", "Gates"]

MAX_GROUPS = 16_384
"""Groups whose barriers one peer may make us remember before we use them ourselves."""

LAST_WORDS = 0.03
"""Seconds after which a peer that died is not going to be reported as having arrived."""

MAX_ROUNDS = 32
"""More rounds than any group has: enough for four billion ranks."""

Tell: TypeAlias = Callable[[int, Kind, int, int, int], None]
"""(rank, kind, group, number, round or lost rank)"""


class BarrierWait(Operation):
    """A rank's arrival at a barrier, until everybody is there."""

    __slots__ = ("gate", "gates", "group", "members")

    def __init__(self, gates: Gates, driver: Driver, group: int, members: Sequence[int]) -> None:
        super().__init__(driver)
        self.gates = gates
        self.group = group
        self.members = members

    def describe(self) -> str:
        """Count the members."""
        return f"The barrier of {len(self.members)} ranks"

    def timeout_error(self, seconds: float) -> Timeout:
        """Name the absent."""
        missing = self.gates.missing(self.group)
        names = ", ".join(map(str, missing))
        who = f"rank {names} has" if len(missing) == 1 else f"ranks {names} have"
        cause = f"{who} not arrived" if missing else "all ranks arrived, but too late"
        return Timeout(
            f"{self.describe()} was not passed within {seconds:g} s",
            seconds=seconds,
            missing=missing,
            rank=missing[0] if len(missing) == 1 else None,
            cause=cause,
            hint="See what they are doing, then call the barrier again: it goes on from here.",
        )


class _Gate:
    """The barriers of one group."""

    __slots__ = ("barrier", "named_by", "unclaimed", "waiting")

    def __init__(self, rank: int, named_by: int | None) -> None:
        self.barrier = Barrier(rank)
        self.named_by = named_by  # the peer we heard of it from, until we use it ourselves
        self.waiting: deque[BarrierWait] = deque()
        self.unclaimed = False  # passed after its caller had given up: the next caller has it


class Gates:
    """The barriers of all groups."""

    def __init__(
        self, rank: int, world_size: int, tell: Tell, lost: Callable[[int], DistributedError]
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._tell = tell
        self._lost_error = lost
        self._lock = threading.Lock()
        self._gates: dict[int, _Gate] = {}
        self._named: dict[int, int] = {}  # rank -> groups we know from it alone
        self._lost: dict[int, float] = {}  # rank -> from when on its silence is certain

    def arrive(self, driver: Driver, group: int, members: Sequence[int]) -> BarrierWait:
        """Arrive at the next barrier of a group."""
        stranger = next((m for m in members if not 0 <= m < self._world_size), None)
        if stranger is not None or self._rank not in members:
            rank = self._rank if stranger is None else stranger
            raise InvalidRank(rank, self._world_size, hint=f"The barrier is of {list(members)}.")
        wait = BarrierWait(self, driver, group, members)
        with self._lock:
            gate = self._gate(group)
            if gate.named_by is not None:
                self._named[gate.named_by] -= 1
                gate.named_by = None
            if gate.unclaimed:
                gate.unclaimed = False
                wait.finish()
                return wait
            gate.waiting.append(wait)
            if len(gate.waiting) == 1:
                self._carry_out(group, gate, gate.barrier.enter(members))
        self.tick()
        return wait

    def announce(self, wait: BarrierWait) -> None:
        """It takes long: let everybody know that we are here."""
        with self._lock:
            gate = self._gate(wait.group)
            if gate.waiting and gate.waiting[0] is wait:
                self._carry_out(wait.group, gate, gate.barrier.announce())

    def give_up(self, wait: BarrierWait) -> None:
        """Stop waiting; the barrier itself stays where it is."""
        with self._lock:
            if not wait.done:
                self._gate(wait.group).waiting.remove(wait)
                wait.finish(Cancelled("The barrier was cancelled"))

    def missing(self, group: int) -> list[int]:
        """Who has not arrived at the current barrier of a group."""
        with self._lock:
            return self._gate(group).barrier.missing()

    def receive(self, sender: int, header: Header) -> None:
        """A frame about a barrier."""
        bound = MAX_ROUNDS if header.kind == Kind.TOKEN else self._world_size
        blames_us = header.kind == Kind.BROKEN and header.piece == self._rank
        if header.length or header.piece >= bound or blames_us:
            raise MalformedFrame(f"Rank {sender} sent an impossible {header.kind.name} frame")
        with self._lock:
            gate = self._gate(header.group, named_by=sender)
            barrier, number = gate.barrier, header.operation
            effects: list[Effect] = []
            if header.kind == Kind.TOKEN:
                effects = barrier.receive_token(sender, number, header.piece)
            elif header.kind == Kind.ARRIVED:
                barrier.receive_arrival(sender, number)
            else:
                effects = barrier.receive_failure(number, header.piece)
            self._carry_out(header.group, gate, effects)

    def lose(self, rank: int, *, parted: bool) -> None:
        """A peer is gone; one that ``parted`` properly has said which barriers it had passed."""
        now = time.monotonic()
        with self._lock:
            self._lost[rank] = now if parted else now + LAST_WORDS
            for group, gate in self._gates.items():
                self._carry_out(group, gate, gate.barrier.lose(rank))
        self.tick()

    def tick(self) -> None:
        """Wait no longer for lost peers of which nothing more can be heard."""
        if not self._lost:
            return
        now = time.monotonic()
        with self._lock:
            silent = [rank for rank, certain in self._lost.items() if certain <= now]
            for group, gate in self._gates.items():
                for rank in silent:
                    self._carry_out(group, gate, gate.barrier.exclude(rank))

    def part(self) -> None:
        """We leave: tell the others which barriers we had passed."""
        with self._lock:
            for group, gate in self._gates.items():
                for rank in range(self._world_size):
                    if rank != self._rank and gate.barrier.passed:
                        self._tell(rank, Kind.ARRIVED, group, gate.barrier.passed, 0)

    def end(self, error: DistributedError) -> None:
        """This side closes: nobody passes any more."""
        with self._lock:
            finish_all([w for gate in self._gates.values() for w in gate.waiting], error)

    def _gate(self, group: int, named_by: int | None = None) -> _Gate:
        gate = self._gates.get(group)
        if gate is None:
            if named_by is not None:  # each has its own bound: one cannot use up another's
                self._named[named_by] = self._named.get(named_by, 0) + 1
                if self._named[named_by] > MAX_GROUPS:
                    raise MalformedFrame(f"Rank {named_by} named too many groups")
            gate = self._gates[group] = _Gate(self._rank, named_by)
            for rank in self._lost:
                gate.barrier.lose(rank)
        return gate

    def _carry_out(self, group: int, gate: _Gate, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Token):
                self._tell(effect.to, Kind.TOKEN, group, effect.number, effect.round)
            elif isinstance(effect, Announce):
                kind = Kind.ARRIVED if effect.lost is None else Kind.BROKEN
                self._tell(effect.to, kind, group, effect.number, effect.lost or 0)
            elif isinstance(effect, Failed):
                self._leave(group, gate, self._lost_error(effect.lost))
            else:
                self._leave(group, gate, None)

    def _leave(self, group: int, gate: _Gate, error: DistributedError | None) -> None:
        if gate.waiting:
            gate.waiting.popleft().finish(error)
        elif error is None:
            gate.unclaimed = True
        if gate.waiting:
            self._carry_out(group, gate, gate.barrier.enter(gate.waiting[0].members))
