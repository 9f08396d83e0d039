"""Barriers of several members with a link each way between any two, delivered one by one.

A link keeps its order, as TCP does; links do not wait for each other.  A member that dies leaves
its links ending behind whatever of its last messages still got out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from potluck.backend.barrier import Announce, Barrier, BarrierFailed, BarrierPassed, Effect, Token

Link: TypeAlias = tuple[int, int]
Mail: TypeAlias = Token | Announce | None
"""None is the end of the link."""


class Hall:
    """A group at its barriers, with the rules that must hold at every step."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.alive = set(members)
        self.barriers = {member: Barrier(member) for member in members}
        self.entered = dict.fromkeys(members, 0)  # the highest barrier each has arrived at
        self.passed = dict.fromkeys(members, 0)
        self.failed: dict[int, int] = {}  # member -> the lost one it was told of
        self.sent: list[Token | Announce] = []
        self._links: dict[Link, deque[Mail]] = {}
        self._unsure: set[Link] = set()

    # -- what members do -----------------------------------------------------------------------

    def enter(self, member: int) -> None:
        """Call the barrier, for the first time or again."""
        barrier = self.barriers[member]
        self.entered[member] = barrier.number
        self._carry_out(member, barrier.enter(self.members))

    def is_waiting(self, member: int) -> bool:
        """Whether its last call has neither passed nor failed."""
        return self.passed[member] < self.entered[member] and member not in self.failed

    def announce(self, member: int) -> None:
        """It waits long and says so."""
        self._carry_out(member, self.barriers[member].announce())

    def lose(self, member: int, keep: Callable[[int], int] = lambda sent: sent) -> None:
        """It dies or leaves; of what is on its way, ``keep`` says how much still arrives."""
        self.alive.remove(member)
        for other in self.alive:
            link = self._links.setdefault((member, other), deque())
            for _ in range(len(link) - keep(len(link))):
                link.pop()
            link.append(None)
            self._links.pop((other, member), None)

    def leave(self, member: int) -> None:
        """It closes as it should: it says which barrier it has passed, and all of that arrives."""
        for other in self.alive - {member}:
            self._links.setdefault((member, other), deque()).append(
                Announce(other, self.passed[member])
            )
        self.lose(member)

    def unsure(self) -> list[Link]:
        """Who has lost whom and does not yet count on its silence."""
        return sorted((lost, member) for lost, member in self._unsure if member in self.alive)

    def exclude(self, lost: int, member: int) -> None:
        """Enough time has passed for a member: of the lost one it will hear nothing more."""
        self._unsure.remove((lost, member))
        self._carry_out(member, self.barriers[member].exclude(lost))

    # -- what the network does -----------------------------------------------------------------

    def pending(self) -> list[Link]:
        """Links with something on its way."""
        return [link for link, mail in self._links.items() if mail]

    def deliver(self, link: Link, times: int = 1) -> None:
        """Hand over the oldest message of a link, now and then more than once."""
        sender, receiver = link
        mail = self._links[link].popleft()
        barrier = self.barriers[receiver]
        for _ in range(times):
            if mail is None:
                self._unsure.add(link)
                effects = barrier.lose(sender)
            elif isinstance(mail, Token):
                effects = barrier.receive_token(sender, mail.number, mail.round)
            elif mail.lost is not None:
                effects = barrier.receive_failure(mail.number, mail.lost)
            else:
                barrier.receive_arrival(sender, mail.number)
                effects = []
            self._carry_out(receiver, effects)

    def settle(self, chance: random.Random, most_copies: int = 1) -> None:
        """Deliver everything, links in random order."""
        while pending := self.pending():
            self.deliver(chance.choice(pending), chance.randint(1, most_copies))

    # -- the rules -------------------------------------------------------------------------------

    def _carry_out(self, member: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Token | Announce):
                assert effect.to != member, "a member talks to itself"
                self.sent.append(effect)
                if effect.to in self.alive:
                    self._links.setdefault((member, effect.to), deque()).append(effect)
            elif isinstance(effect, BarrierPassed):
                self._check_passed(member, effect)
            else:
                self._check_failed(member, effect)

    def _check_passed(self, member: int, effect: BarrierPassed) -> None:
        absent = [other for other in self.members if self.entered[other] < effect.number]
        assert not absent, f"{member} passed {effect.number} before {absent} entered it"
        assert member not in self.failed, f"{member} passed after it had failed"
        assert effect.number == self.passed[member] + 1 == self.entered[member]
        self.passed[member] = effect.number

    def _check_failed(self, member: int, effect: BarrierFailed) -> None:
        assert effect.lost in self.members
        assert effect.lost not in self.alive, f"{effect.lost} is alive and blamed"
        assert effect.number == self.entered[member] == self.passed[member] + 1
        assert self.failed.setdefault(member, effect.lost) == effect.lost, "another one is blamed"
