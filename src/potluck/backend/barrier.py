"""The barrier: dissemination in ⌈log₂ n⌉ rounds, as a pure state machine.

In round *k* a member sends a token to the one 2ᵏ places after it and waits for the token of the
one 2ᵏ places before it; after the last round every member is known to have arrived.  Tokens are
numbered and kept as the highest number seen, so early, late and repeated ones need no queue.

A barrier that timed out keeps its number: calling it again continues where it stopped.  A member
that waits long tells all others, so that a member that times out can name those that are missing.
A member that dies blocks only the one that awaits its token.  That one tells the others, and every
member that fails passes the failure on, so all fail: at this barrier, or at the next if they had
passed this one.  A member that passed the barrier and then left blocks no other member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Token:
    """Send a token to ``to``."""

    to: int
    number: int
    round: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell ``to`` that we wait in barrier ``number``, or that ``lost`` broke it."""

    to: int
    number: int
    lost: int | None = None


@dataclass(frozen=True, slots=True)
class BarrierPassed:
    """Every member has arrived."""

    number: int


@dataclass(frozen=True, slots=True)
class BarrierFailed:
    """The barrier cannot complete because ``lost`` is gone."""

    number: int
    lost: int


Effect: TypeAlias = Token | Announce | BarrierPassed | BarrierFailed


class Barrier:
    """The barriers of one group, seen from one member.  Ranks are those of the whole world."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.passed = 0
        self._members: Sequence[int] = ()
        self._inside = False
        self._round = 0
        self._tokens: dict[tuple[int, int], int] = {}  # (sender, round) -> highest number
        self._arrived: dict[int, int] = {}  # member -> highest number it is known to wait in
        self._broken: tuple[int, int] | None = None  # the first that cannot complete, and for whom
        self._told = False  # the others know of it from us
        self._lost: set[int] = set()
        self._excluded: set[int] = set()  # of the lost: nothing will be heard of them any more

    @property
    def number(self) -> int:
        """The barrier we are in, or would enter next."""
        return self.passed + 1

    def enter(self, members: Sequence[int]) -> list[Effect]:
        """Arrive at the next barrier, or return to one that timed out."""
        self._members = members
        if self._inside:
            return self._advance([])
        self._inside = True
        self._round = 0
        return self._advance(self._token() if self._rounds else [])

    def receive_token(self, sender: int, number: int, round_: int) -> list[Effect]:
        """Another member sent a token."""
        key = (sender, round_)
        self._tokens[key] = max(number, self._tokens.get(key, 0))
        self.receive_arrival(sender, number)
        return self._advance([]) if self._inside else []

    def receive_arrival(self, sender: int, number: int) -> None:
        """Another member says that it waits in barrier ``number``."""
        self._arrived[sender] = max(number, self._arrived.get(sender, 0))

    def receive_failure(self, number: int, lost: int) -> list[Effect]:
        """Another member says that barrier ``number`` is broken by ``lost``."""
        self._break(number, lost)
        return self._advance([]) if self._inside else []

    def lose(self, member: int) -> list[Effect]:
        """The connection to a member is gone; whatever it sent before has been received."""
        self._lost.add(member)
        return self._advance([]) if self._inside else []

    def exclude(self, member: int) -> list[Effect]:
        """A lost member had time enough to be seen here: unless it was, it will never come.

        Without this, a barrier would wait for those who could tell until they arrive themselves.
        """
        self._excluded.add(member)
        return self._advance([]) if self._inside else []

    def announce(self) -> list[Effect]:
        """We have waited long: tell everybody that we are here."""
        return [Announce(member, self.number) for member in self._others()]

    def missing(self) -> list[int]:
        """Members that no other member has seen arrive at the current barrier."""
        return [m for m in self._others() if self._arrived.get(m, 0) < self.number]

    @property
    def _rounds(self) -> int:
        return (len(self._members) - 1).bit_length()

    def _others(self) -> list[int]:
        return [member for member in self._members if member != self.me]

    def _neighbour(self, distance: int) -> int:
        place = self._members.index(self.me)
        return self._members[(place + distance) % len(self._members)]

    def _token(self) -> list[Effect]:
        return [Token(self._neighbour(1 << self._round), self.number, self._round)]

    def _advance(self, effects: list[Effect]) -> list[Effect]:
        number = self.number
        if self._lost:
            self._notice_losses()
        while self._round < self._rounds and not self._is_broken:
            source = self._neighbour(-(1 << self._round))
            if self._tokens.get((source, self._round), 0) < number:
                return effects
            self._round += 1
            if self._round < self._rounds:
                effects += self._token()
        if self._is_broken:
            return self._fail(effects)
        self._inside = False
        self.passed = number
        return [*effects, BarrierPassed(number)]

    def _notice_losses(self) -> None:
        """A token that is still to come from one that is gone, in whichever round, never comes."""
        for round_ in range(self._round, self._rounds):
            source = self._neighbour(-(1 << round_))
            if source in self._lost and self._tokens.get((source, round_), 0) < self.number:
                self._break(self.number, source)
        for member in self.missing():
            if member in self._excluded:
                self._break(self.number, member)

    @property
    def _is_broken(self) -> bool:
        return self._broken is not None and self._broken[0] <= self.number

    def _break(self, number: int, lost: int) -> None:
        """Neither this barrier nor a later one can complete: the lost one will never come."""
        if self._broken is None or (number < self._broken[0] and not self._is_broken):
            self._broken, self._told = (number, lost), False

    def _fail(self, effects: list[Effect]) -> list[Effect]:
        assert self._broken is not None
        number, lost = self._broken
        if not self._told:
            self._told = True
            # Not to the lost one: if it lives after all, it would take us for a liar.
            told = [m for m in self._others() if m != lost and m not in self._lost]
            effects += [Announce(m, number, lost) for m in told]
        return [*effects, BarrierFailed(self.number, lost)]
