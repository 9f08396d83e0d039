"""Who may connect to this process: its namespace and roster, as they are on the disk right now.

One object serves all openings of a process.  Another process of this machine may have changed
secret or roster (a command, another group); what is on the disk counts, and is read again when the
files have changed.

A namespace that this machine keeps under a secret of its own has a roster, founded on first use,
and the roster decides.  Where there is none (a passphrase, the open namespace, a namespace that is
not kept here), every machine with the secret belongs.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from potluck._decode import printable
from potluck._types import NodeId
from potluck._version import THIS_BUILD, NewerFile, VersionMismatch
from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame, UnsupportedOperation
from potluck.identity.namespace import MAX_PREVIOUS, NetworkNamespace, Protection, UnknownNamespace
from potluck.identity.node import (
    NodeIdentity,
    ThisProcess,
    machine_name,
    node_id,
    short_name,
    this_process,
)
from potluck.identity.private_files import (
    KEY_SIZE,
    DamagedFile,
    exclusive_lock,
    read_private,
    replace_private,
)
from potluck.logs import get_logger
from potluck.net.secure_socket import Security
from potluck.trust.admission import (
    AdmissionRefused,
    Granted,
    RosterExchange,
    digest,
    judge_clone,
    judge_hello,
    judge_peer,
)
from potluck.trust.pairing_protocol import Belonging, Namespace
from potluck.trust.roster import MAX_FILE_BYTES, ROSTER_VERSION, Roster, Taken, take
from potluck.trust.roster_records import (
    Card,
    RosterRefused,
    Signer,
    Status,
    Verifier,
    clean_name,
    commitment_to,
)
from potluck.wire_messages import Introduction, Told

# --------------------------------------------------------------------------------------------------
# A group as this machine keeps it: a namespace, its roster, and our own place in it.
#
# The cores decide on bytes and the files know no rules; here the two meet.  Every change is made to
# what is on the disk at that moment, under a lock, because another process of this machine may have
# changed it too.  A secret that this machine proposed waits in the file ``proposed`` beside the
# roster until its rotation is accepted; it is written before the record that refers to it, so
# no crash can leave a group whose secret no machine has.

_PURPOSE = "membership"  # what node keys sign for rosters and pairings


class MembershipChanged(DistributedError, RuntimeError):
    """Another process changed the group while this one was using it."""


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
    """The roster on the disk; None if there is none yet."""
    data = read_private(namespace.roster_path, limit=MAX_FILE_BYTES + 1)
    if data is None:
        return None
    try:
        return Roster.from_bytes(data, VERIFIER, limit=MAX_FILE_BYTES)
    except MalformedFrame as error:
        if isinstance(error.got, int) and error.got > ROSTER_VERSION:
            raise NewerFile(namespace.roster_path, error.got, ROSTER_VERSION) from error
        raise DamagedFile(
            f"{namespace.roster_path} is damaged",
            cause=error.message,
            hint="Restore it from a backup, or leave the group and pair this machine again: "
            f"potluck unpair {namespace.name}",
        ) from error


def write_roster(namespace: NetworkNamespace, roster: Roster) -> None:
    """Keep the roster, with what this machine alone remembers of it."""
    replace_private(namespace.roster_path, roster.to_bytes(with_trust=True))


def require_roster(namespace: NetworkNamespace) -> None:
    """Raise if the namespace has no list of members."""
    if namespace.protection is Protection.PASSPHRASE:
        raise UnsupportedOperation(
            f'"{namespace.name}" has no member list: every machine with its passphrase is a member',
            hint="To exclude a machine, choose another passphrase, and give it to every machine "
            "that stays.",
        )
    if namespace.protection is not Protection.SECRET:
        raise UnsupportedOperation(
            f"The {namespace.name} group has no member list: every machine is in it",
            hint="Choose another group with --namespace.",
        )


@dataclass(frozen=True)
class NamespaceMembership:
    """A namespace kept here, its roster, and who we are in it."""

    namespace: NetworkNamespace
    roster: Roster
    me: Signer

    @classmethod
    def of(cls, namespace: NetworkNamespace, me: Signer) -> NamespaceMembership:
        """Of a namespace that is kept here; with a new roster, founded by us, if it has none."""
        require_roster(namespace)
        with lock(namespace.home):
            if read_roster(namespace) is None:
                present = NetworkNamespace.load(namespace.name, home=namespace.home)
                commitment = commitment_to(present.secret)
                write_roster(namespace, Roster.found(me, commitment, secrets.token_bytes(32)))
            return _settled(namespace.name, me, namespace.home)

    @classmethod
    def as_it_is(cls, namespace: NetworkNamespace, me: Signer) -> NamespaceMembership:
        """The same without changing anything: without a roster, as if we had just founded it."""
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
        """Whether the secret we keep is the one in the roster."""
        return self.roster.is_secret(self.namespace.secret)

    @property
    def belonging(self) -> Belonging:
        """What matters when another group is offered."""
        others = sum(member.node_id != self.me.node_id for member in self.roster.members)
        return Belonging(
            self.namespace.name,
            self.roster.group_id,
            commitment_to(self.namespace.secret),
            others,
            self.namespace.is_unused,
        )

    def offer(self) -> Namespace:
        """What a pairing hands over; raises where we have nothing to hand over."""
        self.require_membership()
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

    def require_membership(self) -> None:
        """Raise if this machine is no longer a member, or lacks the present secret."""
        self.require_place()
        if not self.roster.is_member(self.me.node_id):
            raise RosterRefused(self.roster.explain(self.me.node_id), got=self.me.node_id)
        if not self.has_secret:
            raise MembershipChanged(
                f'"{self.namespace.name}" has a new secret that this machine does not have yet',
                hint="Pair it again with a machine that has it: `potluck pair` there.",
            )

    # --- changes ---

    def admit(self, card: Card) -> NamespaceMembership:
        """Write down a machine that was paired here; from now on the namespace is in use."""
        with lock(self.home):
            present = self._unchanged()
            roster = present.roster.admit(card, self.me)
            write_roster(present.namespace, roster)
            present.namespace.mark_used()
            return NamespaceMembership(present.namespace, roster, self.me)

    def propose(self, change: Callable[[Roster, bytes], Roster]) -> NamespaceMembership:
        """Propose a new secret: ``change`` gets the roster and the hash that stands for it.

        If the rules let it take effect at once, the namespace has the new secret afterwards; else
        the record waits in ``roster.pending``.
        """
        secret = secrets.token_bytes(KEY_SIZE)
        with lock(self.home):
            present = self._unchanged()
            present.require_membership()
            roster = change(present.roster, commitment_to(secret))
            namespace = present.namespace
            _keep_proposed(namespace, [secret, *_proposed(namespace)])
            write_roster(namespace, roster)
            return _settled(namespace.name, self.me, self.home)

    def sign(self, name: bytes) -> NamespaceMembership:
        """Agree to a change that another machine proposed."""
        with lock(self.home):
            present = self._unchanged()
            roster = _renewed(present.roster, present.roster.sign(name, self.me), self.me)
            write_roster(present.namespace, roster)
            return _settled(self.namespace.name, self.me, self.home)

    def take(self, offered: Roster, sender: NodeId) -> tuple[NamespaceMembership, Taken]:
        """Merge what another machine, which has proved its id, tells; what it means for us."""
        with lock(self.home):
            present = _settled(self.namespace.name, self.me, self.home)
            taken = take(present.roster, offered, sender, self.me.node_id)
            roster = _renewed(present.roster, taken.roster, self.me)
            if roster != present.roster:
                write_roster(present.namespace, roster)
            after = _settled(self.namespace.name, self.me, self.home)
            return after, replace(taken, roster=after.roster)

    def store_secret(self, secret: bytes) -> NamespaceMembership:
        """Keep the secret that a member has sent, if it is the one in the roster."""
        with lock(self.home):
            present = _settled(self.namespace.name, self.me, self.home)
            if not present.roster.is_secret(secret):
                raise RosterRefused("The secret received is not the one in the member list")
            if not present.has_secret:
                present.namespace.rotated(secret).save()
            return _settled(self.namespace.name, self.me, self.home)

    def _unchanged(self) -> NamespaceMembership:
        """What is on the disk now, if it is still the group and the secret we know."""
        present = _settled(self.namespace.name, self.me, self.home)
        is_same = present.roster.group_id == self.roster.group_id
        if not is_same or not present.namespace.has_secret(self.namespace.secret):
            raise MembershipChanged(
                f'"{self.namespace.name}" was changed meanwhile by another process of this machine',
                hint="Try again.",
            )
        return present


def _renewed(before: Roster, after: Roster, me: Signer) -> Roster:
    """After a change of the secret, with those again whom we brought in while it was under way."""
    if after.generation.number > before.generation.number:
        with contextlib.suppress(RosterRefused):  # then they have to be paired again
            return after.renew(me)
    return after


def _settled(name: str, me: Signer, home: Path) -> NamespaceMembership:
    """What is on the disk, with our own proposal put in force if it has been accepted."""
    namespace = NetworkNamespace.load(name, home=home)
    roster = read_roster(namespace)
    if roster is None:
        raise MembershipChanged(f'"{name}" was replaced by another process', hint="Try again.")
    if not roster.is_secret(namespace.secret):
        waiting = _proposed(namespace)
        for secret in filter(roster.is_secret, waiting):
            namespace = namespace.rotated(secret)
            namespace.save()
            _keep_proposed(namespace, [other for other in waiting if other != secret])
    return NamespaceMembership(namespace, roster, me)


def _proposed(namespace: NetworkNamespace) -> list[bytes]:
    """The secrets this machine has proposed, newest first."""
    path = namespace.directory / "proposed"
    joined = read_private(path, limit=MAX_PREVIOUS * KEY_SIZE + 1) or b""
    if len(joined) % KEY_SIZE:
        raise DamagedFile(f"{path} is damaged", hint="Delete it, and propose the change again.")
    return [joined[at : at + KEY_SIZE] for at in range(0, len(joined), KEY_SIZE)]


def _keep_proposed(namespace: NetworkNamespace, waiting: list[bytes]) -> None:
    replace_private(namespace.directory / "proposed", b"".join(waiting[:MAX_PREVIOUS]))


# --------------------------------------------------------------------------------------------------


logger = get_logger(__name__)

MAX_DIFFERING = 64
"""Machines of other versions that are remembered."""


class TrustStore:
    """What this process knows of who belongs; used by several threads."""

    def __init__(
        self, security: Security, process: Callable[[NodeId], ThisProcess] = this_process
    ) -> None:
        self.security = security
        self._process = process
        namespace = security.namespace
        self._has_roster = namespace.protection is Protection.SECRET and namespace.is_kept
        self._files = [namespace.directory / name for name in ("secret", "roster")]
        self._lock = threading.Lock()
        self._seen: list[tuple[int, int] | None] = []
        self._membership: NamespaceMembership | None = None
        self._digest = b""
        self._met: set[NodeId] = {security.me}
        self.last_refusal: str | None = None
        """Why a node was refused last, for the error of a call that waits for it in vain."""
        self.last_stranger: HandshakeRefused | None = None
        """The same of a caller that could not even prove that it has the secret."""
        self._differing: dict[str, VersionMismatch] = {}

    @classmethod
    def load(cls, namespace: NetworkNamespace | str | None = None) -> TrustStore:
        """Of the given namespace, or of the one this machine uses."""
        members = cls(Security.load(namespace))
        members.check()
        return members

    def check(self) -> None:
        """Raise now for what is damaged, or if we are not a member, and not at the first call."""
        with self._lock:
            self._refresh()
        self.require_place()

    def require_place(self) -> None:
        """Raise if this machine is not on its roster, and never was."""
        if membership := self.membership:
            membership.require_place()

    @property
    def me(self) -> NodeId:
        """Our own id."""
        return self.security.me

    @property
    def membership(self) -> NamespaceMembership | None:
        """As it is now; None where every machine with the secret belongs."""
        with self._lock:
            self._refresh()
            return self._membership

    @property
    def roster(self) -> Roster | None:
        """Its roster."""
        membership = self.membership
        return membership.roster if membership else None

    def name_of(self, node: NodeId) -> str:
        """What people call a machine: its name on the roster, or the one made from its id."""
        roster = self.roster
        for generation in reversed(roster.history.generations if roster else ()):
            if node in generation.members:
                return printable(generation.members[node].name)
        return short_name(node)

    def introduction(self) -> Introduction:
        """What a hello of ours says about us; reads the disk, so that it holds now."""
        with self._lock:
            self._refresh()
            told = self._digest
        process = self._process(self.me)
        return Introduction(told, process.machine, process.boot, process.slot, process.incarnation)

    # --- decisions ---

    def judge_hello(
        self, caller: NodeId, introduction: Introduction, tag: str
    ) -> Granted | RosterExchange | AdmissionRefused:
        """What to do with a caller that came under the secret of ``tag``."""
        if caller == self.me:
            known = self.introduction()
            if clone := judge_clone(caller, known, introduction, socket.gethostname()):
                return clone
        roster = self.roster
        is_current = self.security.is_current(tag)
        return judge_hello(roster, caller, introduction.roster, is_current=is_current)

    def judge_peer(self, peer: NodeId) -> AdmissionRefused | None:
        """Whether to open a connection with a node, as far as we know."""
        return judge_peer(self.roster, peer)

    def refused_stranger(self, error: HandshakeRefused) -> None:
        """Remember a caller that did not get through TLS."""
        self.last_stranger = error

    # --- versions ---

    @property
    def differing(self) -> dict[str, VersionMismatch]:
        """Machines that were met and with which no work is possible: by id, in clear by address."""
        with self._lock:
            return dict(self._differing)

    def differs(self, error: VersionMismatch, peer: NodeId | None, host: str) -> VersionMismatch:
        """Remember a machine that speaks another protocol; the error with the name that it has."""
        who = peer or host
        named = VersionMismatch(
            machine_name(), THIS_BUILD, self.name_of(peer) if peer else host, error.theirs
        )
        named.node, named.host = peer, host
        with self._lock:
            is_news = str(self._differing.get(who)) != str(named)
            self._differing.pop(who, None)
            self._differing[who] = named
            if len(self._differing) > MAX_DIFFERING:
                del self._differing[next(iter(self._differing))]
        self.last_refusal = str(named)
        if is_news:
            logger.warning("%s", named)
        return named

    # --- what is told ---

    def tell(self, peer: NodeId, tag: str) -> Told:
        """Our roster; and our secret, if the peer is a member that used an earlier one."""
        membership = self.membership
        if membership is None:
            return Told()
        return Told(membership.roster.to_bytes(), self._secret_for(membership, peer, tag))

    def secret_for(self, peer: NodeId, tag: str) -> Told | None:
        """The secret alone, for a peer that used an earlier one; None if it may not have it."""
        membership = self.membership
        secret = self._secret_for(membership, peer, tag) if membership else b""
        return Told(secret=secret) if secret else None

    def _secret_for(self, membership: NamespaceMembership, peer: NodeId, tag: str) -> bytes:
        may_have_it = membership.roster.is_member(peer) and membership.has_secret
        return (
            membership.namespace.secret
            if may_have_it and not self.security.is_current(tag)
            else b""
        )

    def take(self, peer: NodeId, told: Told) -> Taken:
        """Merge what a peer has told, and keep the secret it has handed over."""
        membership = self.membership
        if membership is None:
            raise HandshakeRefused(
                "The peer has a member list but this machine does not",
                hint="Pair this machine: copying the secret by hand is not enough.",
            )
        offered = Roster.from_bytes(told.roster, VERIFIER)
        with self._lock:
            membership, taken = membership.take(offered, peer)
            if told.secret and membership.roster.is_secret(told.secret):
                membership = membership.store_secret(told.secret)
            self._know(membership)
        return taken

    def store_secret(self, secret: bytes) -> None:
        """Keep the secret that a peer has handed over."""
        membership = self.membership
        with self._lock:
            if membership is not None:
                self._know(membership.store_secret(secret))

    def met(self, peer: NodeId) -> None:
        """A connection with a member has opened; both have the same roster."""
        with self._lock:
            self._differing.pop(peer, None)  # it has been upgraded
        membership = self.membership
        if membership is None or peer in self._met:
            return
        self._met.add(peer)
        membership.namespace.mark_used()
        if not membership.roster.generation.members.keys() <= membership.roster.counted:
            with self._lock:  # it tells of the same members as we do, which may confirm some
                self._know(membership.take(membership.roster, peer)[0])

    # --- the disk ---

    def _refresh(self) -> None:
        if not self._has_roster:
            return
        seen = [_stamp(file) for file in self._files]
        if seen == self._seen and None not in seen:
            return
        name, home = self.security.namespace.name, self.security.namespace.home
        try:
            namespace = NetworkNamespace.load(name, home=home)
        except UnknownNamespace:
            if self._membership is None:
                raise
            return  # left meanwhile: this process ends with what it knew
        self._know(NamespaceMembership.of(namespace, signer_of(self.security.identity)))

    def _know(self, membership: NamespaceMembership) -> None:
        self._membership = membership
        self._digest = digest(membership.roster)
        self.security.renew(membership.namespace)
        self._seen = [_stamp(file) for file in self._files]


def _stamp(file: Path) -> tuple[int, int] | None:
    """Files are replaced, never changed, so each version has a number of its own."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
