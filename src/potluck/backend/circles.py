"""A circle as this machine keeps it: a namespace, its roster, and our own place in it.

The cores decide on bytes and the files know no rules; here the two meet.  Every change is made to
what is on the disk at that moment, under a lock, because another process of this machine may have
changed it too.  A secret that this machine proposed waits in the file ``proposed`` beside the
roster until its rotation is accepted; it is written before the record that refers to it, so
no crash can leave a circle whose secret nobody has.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from potluck.core.cards import Card, Signer, Verifier, clean_name
from potluck.core.pairing import Belonging, Namespace
from potluck.core.roster import MAX_FILE_BYTES, Roster, Status, commitment_to
from potluck.core.roster_exchange import Taken, take
from potluck.core.roster_records import RosterRefused
from potluck.errors import DistributedError, MalformedFrame, UnsupportedOperation
from potluck.net.identity import NodeIdentity, node_id
from potluck.net.names import machine_name
from potluck.net.namespace import NetworkNamespace, Protection
from potluck.net.namespace_files import MAX_PREVIOUS
from potluck.net.private_files import (
    KEY_SIZE,
    DamagedFile,
    exclusive_lock,
    read_private,
    replace_private,
)
from potluck.vocabulary import NodeId

__all__ = [
    "VERIFIER",
    "Circle",
    "CircleChanged",
    "lock",
    "read_roster",
    "require_roster",
    "signer_of",
    "write_roster",
]

_PURPOSE = "membership"  # what node keys sign for rosters and pairings


class CircleChanged(DistributedError, RuntimeError):
    """Another process changed the circle while this one was using it."""


def signer_of(identity: NodeIdentity, name: str | None = None) -> Signer:
    """This machine as the cores see it; its name is the host's unless given."""
    label = clean_name(machine_name() if name is None else name)
    if label in {"localhost", "unnamed"}:  # says nothing; the name made from the id does
        label = identity.short_name
    card = Card(identity.id, identity.public_key, label)
    return Signer(card, lambda message: identity.sign(message, purpose=_PURPOSE))


def _verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    return NodeIdentity.verify(public_key, signature, message, purpose=_PURPOSE)


VERIFIER = Verifier(node_id, _verify)
"""How the signatures of other machines are checked."""


def lock(home: Path) -> AbstractContextManager[None]:
    """Held while a roster is changed; taken before the lock of the namespaces, never after."""
    return exclusive_lock(home / "roster.lock")


def read_roster(namespace: NetworkNamespace) -> Roster | None:
    """The roster on the disk; None if nobody has founded one."""
    data = read_private(namespace.roster_path, limit=MAX_FILE_BYTES + 1)
    if data is None:
        return None
    try:
        return Roster.from_bytes(data, VERIFIER, limit=MAX_FILE_BYTES)
    except MalformedFrame as error:
        raise DamagedFile(
            f"{namespace.roster_path} is damaged",
            cause=error.message,
            hint="Restore it from a backup, or leave the namespace and pair this machine again: "
            f"potluck unpair {namespace.name}",
        ) from error


def write_roster(namespace: NetworkNamespace, roster: Roster) -> None:
    """Keep the roster, with what this machine alone remembers of it."""
    replace_private(namespace.roster_path, roster.to_bytes(with_trust=True))


def require_roster(namespace: NetworkNamespace) -> None:
    """Raise if nobody is written down as a member of the namespace."""
    if namespace.protection is Protection.PASSPHRASE:
        raise UnsupportedOperation(
            f'"{namespace.name}" has no roster: whoever knows its passphrase is a member',
            hint="To keep somebody out, agree on another passphrase, and give it to every machine "
            "that stays.",
        )
    if namespace.protection is not Protection.SECRET:
        raise UnsupportedOperation(
            f"The {namespace.name} namespace has no members: whoever wants is in it",
            hint="Name another one with --namespace.",
        )


@dataclass(frozen=True)
class Circle:
    """A namespace kept here, its roster, and who we are in it."""

    namespace: NetworkNamespace
    roster: Roster
    me: Signer

    @classmethod
    def of(cls, namespace: NetworkNamespace, me: Signer) -> Circle:
        """The circle of a namespace that is kept here; founded by us if nobody has."""
        require_roster(namespace)
        with lock(namespace.home):
            if read_roster(namespace) is None:
                present = NetworkNamespace.load(namespace.name, home=namespace.home)
                commitment = commitment_to(present.secret)
                write_roster(namespace, Roster.found(me, commitment, secrets.token_bytes(32)))
            return _settled(namespace.name, me, namespace.home)

    @classmethod
    def as_it_is(cls, namespace: NetworkNamespace, me: Signer) -> Circle:
        """The same without changing anything: where nobody has founded it, as if we just had."""
        roster = read_roster(namespace)
        return cls(
            namespace,
            roster or Roster.found(me, commitment_to(namespace.secret), bytes(32)),
            me,
        )

    # --- questions ---

    @property
    def home(self) -> Path:
        """Below which directory it is kept."""
        return self.namespace.home

    @property
    def has_secret(self) -> bool:
        """Whether the secret we keep is the one the roster speaks of."""
        return self.roster.is_secret(self.namespace.secret)

    @property
    def belonging(self) -> Belonging:
        """What matters when another circle is offered."""
        others = sum(member.node_id != self.me.node_id for member in self.roster.members)
        return Belonging(
            self.namespace.name,
            self.roster.circle,
            commitment_to(self.namespace.secret),
            others,
            self.namespace.is_unused,
        )

    def offer(self) -> Namespace:
        """What a pairing hands over; raises where we have nothing to hand over."""
        self.require_standing()
        return Namespace(self.namespace.name, self.namespace.secret, self.roster.to_bytes())

    def enrolled(self, card: Card) -> bytes:
        """The roster, as others receive it, with one more machine on it."""
        return self.roster.admit(card, self.me).to_bytes()

    def require_place(self) -> None:
        """Raise if this machine was never a member, whatever its files say."""
        me, name = self.me.node_id, self.namespace.name
        if self.roster.status(me) is Status.STRANGER:
            raise RosterRefused(
                f'This machine ({me}) is not a member of "{name}"',
                got=me,
                cause="its key was replaced, or these files are those of another machine",
                hint="Pair it: `potluck pair` on a member shows a code to type here. Or leave: "
                f"potluck unpair {name}",
            )

    def require_standing(self) -> None:
        """Raise if this machine is no member any more, or lacks the present secret."""
        self.require_place()
        if not self.roster.is_member(self.me.node_id):
            raise RosterRefused(self.roster.explain(self.me.node_id), got=self.me.node_id)
        if not self.has_secret:
            raise CircleChanged(
                f'"{self.namespace.name}" has a new secret that this machine does not have yet',
                hint="Pair it again with a machine that has it: `potluck pair` there.",
            )

    # --- changes ---

    def admit(self, card: Card) -> Circle:
        """Write down a machine that was paired here; from now on the namespace is in use."""
        with lock(self.home):
            present = self._unchanged()
            roster = present.roster.admit(card, self.me)
            write_roster(present.namespace, roster)
            present.namespace.mark_used()
            return Circle(present.namespace, roster, self.me)

    def propose(self, change: Callable[[Roster, bytes], Roster]) -> Circle:
        """Propose a new secret: ``change`` gets the roster and the hash that stands for it.

        If the rules let it take effect at once, the namespace has the new secret afterwards; else
        the record waits in ``roster.pending``.
        """
        secret = secrets.token_bytes(KEY_SIZE)
        with lock(self.home):
            present = self._unchanged()
            present.require_standing()
            roster = change(present.roster, commitment_to(secret))
            namespace = present.namespace
            _keep_proposed(namespace, [secret, *_proposed(namespace)])
            write_roster(namespace, roster)
            return _settled(namespace.name, self.me, self.home)

    def sign(self, name: bytes) -> Circle:
        """Agree to a change that another machine proposed."""
        with lock(self.home):
            present = self._unchanged()
            roster = _renewed(present.roster, present.roster.sign(name, self.me), self.me)
            write_roster(present.namespace, roster)
            return _settled(self.namespace.name, self.me, self.home)

    def take(self, offered: Roster, teller: NodeId) -> tuple[Circle, Taken]:
        """Merge what another machine, which has proved its id, tells; what it means for us."""
        with lock(self.home):
            present = _settled(self.namespace.name, self.me, self.home)
            taken = take(present.roster, offered, teller, self.me.node_id)
            roster = _renewed(present.roster, taken.roster, self.me)
            if roster != present.roster:
                write_roster(present.namespace, roster)
            after = _settled(self.namespace.name, self.me, self.home)
            return after, replace(taken, roster=after.roster)

    def inherit(self, secret: bytes) -> Circle:
        """Keep the secret that a member has handed over, if it is the one the roster speaks of."""
        with lock(self.home):
            present = _settled(self.namespace.name, self.me, self.home)
            if not present.roster.is_secret(secret):
                raise RosterRefused("The secret handed over is not the one the roster speaks of")
            if not present.has_secret:
                present.namespace.rotated(secret).save()
            return _settled(self.namespace.name, self.me, self.home)

    def _unchanged(self) -> Circle:
        """What is on the disk now, if it is still the circle and the secret we know."""
        present = _settled(self.namespace.name, self.me, self.home)
        is_same = present.roster.circle == self.roster.circle
        if not is_same or not present.namespace.has_secret(self.namespace.secret):
            raise CircleChanged(
                f'"{self.namespace.name}" was changed meanwhile by another process of this machine',
                hint="Begin again.",
            )
        return present


def _renewed(before: Roster, after: Roster, me: Signer) -> Roster:
    """After a change of the secret, with those again whom we brought in while it was under way."""
    if after.generation.number > before.generation.number:
        with contextlib.suppress(RosterRefused):  # then they have to be paired again
            return after.renew(me)
    return after


def _settled(name: str, me: Signer, home: Path) -> Circle:
    """The circle on the disk, with our own proposal put in force if it has been accepted."""
    namespace = NetworkNamespace.load(name, home=home)
    roster = read_roster(namespace)
    if roster is None:
        raise CircleChanged(f'"{name}" was replaced by another process', hint="Begin again.")
    if not roster.is_secret(namespace.secret):
        waiting = _proposed(namespace)
        for secret in filter(roster.is_secret, waiting):
            namespace = namespace.rotated(secret)
            namespace.save()
            _keep_proposed(namespace, [other for other in waiting if other != secret])
    return Circle(namespace, roster, me)


def _proposed(namespace: NetworkNamespace) -> list[bytes]:
    """The secrets this machine has proposed, newest first."""
    path = namespace.directory / "proposed"
    joined = read_private(path, limit=MAX_PREVIOUS * KEY_SIZE + 1) or b""
    if len(joined) % KEY_SIZE:
        raise DamagedFile(f"{path} is damaged", hint="Delete it, and propose the change again.")
    return [joined[at : at + KEY_SIZE] for at in range(0, len(joined), KEY_SIZE)]


def _keep_proposed(namespace: NetworkNamespace, waiting: list[bytes]) -> None:
    replace_private(namespace.directory / "proposed", b"".join(waiting[:MAX_PREVIOUS]))
