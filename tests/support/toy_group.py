"""A group of machines, each with its own roster, that meet in pairs and exchange bytes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable

from potluck._types import NodeId
from potluck.trust.roster import Roster, Taken, take
from potluck.trust.roster_records import commitment_to
from support.machines import TOY_VERIFIER, machine


def secret(number: int = 0) -> bytes:
    """A secret that repeats."""
    return hashlib.sha256(f"secret {number}".encode()).digest()


def commitment(number: int = 0) -> bytes:
    """What stands for it."""
    return commitment_to(secret(number))


class ToyGroup:
    """Machines by name.  The first founds the group and pairs all the others, unless told."""

    def __init__(self, *names: str) -> None:
        first, *others = names
        self._numbers = itertools.count(1)  # of secrets; the first one is number 0
        self.signers = {first: machine(first)}
        self.rosters = {
            first: Roster.found(self.signers[first], commitment(), bytes(32)),
        }
        for name in others:
            self.pair(first, name)
        self.gossip()

    def id(self, name: str) -> NodeId:
        """The id of a machine."""
        return self.signers[name].node_id

    def pair(self, host: str, guest: str) -> None:
        """``guest`` types the code that ``host`` shows."""
        self.signers.setdefault(guest, machine(guest))
        self.rosters[host] = self.rosters[host].admit(self.signers[guest].card, self.signers[host])
        self.rosters[guest] = self.copy(host).adopted()

    def copy(self, name: str) -> Roster:
        """A machine's roster as others receive it."""
        return Roster.from_bytes(self.rosters[name].to_bytes(), TOY_VERIFIER)

    def tell(self, sender: str, hearer: str) -> Taken:
        """One direction of a meeting."""
        taken = take(self.rosters[hearer], self.copy(sender), self.id(sender), self.id(hearer))
        self.rosters[hearer] = taken.roster
        return taken

    def meet(self, one: str, other: str) -> tuple[Taken, Taken]:
        """Both directions: what the first makes of it, then what the second does."""
        second = self.tell(one, other)
        return self.tell(other, one), second

    def gossip(self, *names: str) -> None:
        """Everybody (or those named) meets everybody, twice."""
        for one, other in [*itertools.combinations(names or self.rosters, 2)] * 2:
            self.meet(one, other)

    def revoke(self, by: str, target: str, keeps: Iterable[str] = ()) -> bytes:
        """Propose; the name of the rotation."""
        kept = [self.id(name) for name in keeps]
        return self._changed(
            by,
            self.rosters[by].revoke(
                self.id(target), self.signers[by], commitment(next(self._numbers)), kept
            ),
        )

    def rotate(self, by: str) -> bytes:
        """Propose; the name of the rotation."""
        roster = self.rosters[by].rotate(self.signers[by], commitment(next(self._numbers)))
        return self._changed(by, roster)

    def sign(self, by: str, name: bytes) -> None:
        """Vote."""
        self.rosters[by] = self.rosters[by].sign(name, self.signers[by])

    def names(self, viewer: str) -> list[str]:
        """The members as one machine sees them."""
        return [member.name for member in self.rosters[viewer].members]

    def _changed(self, by: str, roster: Roster) -> bytes:
        before = self.rosters[by].history.records.rotations.keys()
        self.rosters[by] = roster
        (name,) = roster.history.records.rotations.keys() - before
        return name
