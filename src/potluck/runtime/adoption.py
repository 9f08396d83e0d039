"""What becomes of an offered namespace on this machine: checked, placed among the others, stored.

A plan is made when the offer arrives, so that every obstacle is known, and a person asked, before
we accept; it is carried out when the other side has written us down.  The namespace that gives way
is removed last: a crash in between leaves two, never none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from potluck.backend.circles import VERIFIER, Circle, lock, read_roster, write_roster
from potluck.core.cards import Card, Signer
from potluck.core.pairing import (
    Ask,
    Belonging,
    Namespace,
    Offered,
    Paired,
    decide_adoption,
)
from potluck.core.roster import Roster, commitment_to
from potluck.core.roster_exchange import take
from potluck.errors import MalformedFrame
from potluck.net.namespace import NetworkNamespace
from potluck.net.namespace_files import (
    NamespaceExists,
    NamespaceFiles,
    UnknownNamespace,
    checked_name,
    stored_names,
    usual_name,
)
from potluck.runtime.pairing import PairingFailed

__all__ = ["Adopter", "Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How an offer will be stored."""

    name: str
    """What the namespace is called here."""
    question: str | None
    """What a person has to say yes to first; None if nothing is lost."""
    reason: str
    """What it means, to be told when it is done."""
    gives_way: str | None = None
    """The namespace that is removed afterwards, unless it is kept."""
    was_unused: bool = False
    """Whether that one may go only as long as nobody has joined it."""
    known: Circle | None = None
    """The same circle, kept here already."""


class Adopter:
    """Finds a place for what is offered to this machine.

    ``name`` is what the namespace shall be called here; without it, it keeps its own.
    """

    def __init__(self, home: Path, me: Signer, name: str | None = None) -> None:
        self._home = home
        self._me = me
        self._name = checked_name(name) if name else None

    @property
    def current(self) -> Circle | None:
        """What this machine is in now, if that is one thing."""
        try:
            return self._circle(self._name or usual_name(self._home))
        except UnknownNamespace:
            return None

    @property
    def may_ask(self) -> bool:
        """Whether joining something new would need an answer from a person.

        Raises if anything that is kept here is damaged: better now than when a code is used up.
        """
        circles = self._circles()
        current = self.current
        if current is not None:
            return not current.namespace.is_unused
        return any(not circle.namespace.is_unused for circle in circles)

    def plan(self, offered: Offered, *, keep: bool = False) -> Plan:
        """Where the offer goes; with ``keep`` beside what is here.  Raises if it cannot be."""
        roster = _checked(offered.namespace, offered.peer)
        circles = self._circles()
        for known in circles:
            if known.roster.circle == roster.circle:
                return _plan_for_member(known, roster, offered)
        current = self.current
        decision = decide_adoption(
            current.belonging if current else None, _belonging(offered.namespace, roster)
        )
        question, leaving = None, current.namespace.name if current else None
        used = [each.namespace.name for each in circles if not each.namespace.is_unused]
        if isinstance(decision, Ask):
            question = decision.reason
        elif current is None and used:
            question = f'This machine is in {_listed(used)}. Join "{offered.namespace.name}" too?'
        if keep and question is not None:
            question = leaving = None
        staying = [each for each in used if each != leaving]
        name = self._free_name(offered.namespace.name, staying)
        NetworkNamespace(name, offered.namespace.secret, home=self._home)  # refuses bad names
        reason = decision.reason if not used else _farewell(leaving, staying)
        return Plan(name, question, reason, leaving, was_unused=question is None)

    def _circles(self) -> list[Circle]:
        return [self._circle(name) for name in stored_names(self._home)]

    def _circle(self, name: str) -> Circle:
        return Circle.as_it_is(NetworkNamespace.load(name, home=self._home), self._me)

    def _free_name(self, offered: str, taken: list[str]) -> str:
        """What the newcomer is called: the wanted name, or with a number if that is taken."""
        wanted = self._name or checked_name(offered)
        if wanted not in taken:
            return wanted
        if self._name:
            raise NamespaceExists(
                f"This machine already uses another namespace named {wanted!r}",
                got=wanted,
                hint="Name the new one differently with --namespace.",
            )
        numbers = range(2, len(taken) + 3)
        return next(name for number in numbers if (name := f"{wanted}-{number}") not in taken)

    def store(self, plan: Plan, paired: Paired) -> Circle:
        """Carry out the plan with what the other side has handed over."""
        roster = _checked(paired.namespace, paired.peer)
        me, secret = self._me.node_id, paired.namespace.secret
        if not roster.is_member(me):
            raise PairingFailed(f'"{paired.peer.name}" sent a roster without this machine')
        with lock(self._home):
            if plan.known:
                namespace = plan.known.namespace
                roster = _merged(read_roster(namespace), roster, paired.peer, self._me)
                if not namespace.has_secret(secret):
                    namespace = namespace.rotated(secret)
            else:
                namespace = NetworkNamespace(plan.name, secret, home=self._home)
                roster = roster.adopted()
            namespace.save(replace=plan.gives_way == plan.name and not plan.was_unused)
            write_roster(namespace, roster)
            self._clear(plan)
        return Circle(namespace, roster, self._me)

    def _clear(self, plan: Plan) -> None:
        if plan.gives_way is None or plan.gives_way == plan.name:
            return
        files = NamespaceFiles(self._home, plan.gives_way)
        if not (plan.was_unused and files.is_used):  # somebody may have joined it meanwhile
            files.delete()


def _farewell(leaving: str | None, staying: list[str]) -> str:
    """What becomes of the namespaces this machine was in."""
    if not staying:
        return f'It has left "{leaving}".'
    return f"It is in {_listed(staying)} as before; --namespace says which one is meant."


def _plan_for_member(known: Circle, roster: Roster, offered: Offered) -> Plan:
    """For a circle that this machine is or was in already."""
    ours, theirs = known.roster.history.chain, roster.history.chain
    name = known.namespace.name
    if len(theirs) < len(ours) and ours[: len(theirs)] == theirs:
        raise PairingFailed(
            f'"{offered.peer.name}" has an older secret of "{name}" than this machine',
            hint="Run `potluck pair` here and type the code there.",
        )
    question = None
    if theirs[: len(ours)] != ours:
        question = (
            f'"{offered.peer.name}" follows another change of the secret of "{name}". Join it?'
        )
    decision = decide_adoption(known.belonging, _belonging(offered.namespace, roster))
    return Plan(name, question, decision.reason, known=known)


def _checked(namespace: Namespace, peer: Card) -> Roster:
    """The roster that came with an offer, if it fits the secret and whoever sent it."""
    try:
        roster = Roster.from_bytes(namespace.roster, VERIFIER)
    except MalformedFrame as error:
        raise PairingFailed(f'"{peer.name}" sent a roster that is not valid: {error}') from error
    if not roster.is_secret(namespace.secret) or not roster.is_member(peer.node_id):
        raise PairingFailed(f'"{peer.name}" sent a roster that does not fit what it offers')
    return roster


def _belonging(namespace: Namespace, roster: Roster) -> Belonging:
    return Belonging(namespace.name, roster.circle, commitment_to(namespace.secret))


def _merged(mine: Roster | None, offered: Roster, peer: Card, me: Signer) -> Roster:
    """The roster of a circle we know already, with what both sides know of it."""
    if mine is None or mine.circle != offered.circle:
        return offered.adopted()
    if mine.generation.name == offered.generation.name:
        # We keep our own judgement of the others; only whom we paired with counts at once.
        roster = take(mine, offered, peer.node_id, me.node_id).roster
        return replace(roster, counted=roster.counted | {peer.node_id})
    # A person vouched for the other side's history; what we alone know is added to it.
    return take(offered.adopted(), mine, me.node_id, me.node_id).roster


def _listed(names: list[str]) -> str:
    return " and ".join(f'"{name}"' for name in names)
