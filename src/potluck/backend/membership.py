"""Who may connect to this process: its namespace and roster, as they are on the disk right now.

One object serves all openings of a process.  Another process of this machine may have changed
secret or roster (a command, another group); what is on the disk counts, and is read again when the
files have changed.

A namespace that this machine keeps under a secret of its own has a roster, founded on first use,
and the roster decides.  Where there is none (a passphrase, the open namespace, a namespace that is
not kept here), whoever has the secret belongs.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from potluck.backend.circles import VERIFIER, Circle, signer_of
from potluck.core.handshake import Refused, judge_clone
from potluck.core.introduction import Exchange, Granted, digest, judge_hello, judge_peer
from potluck.core.roster import Roster
from potluck.core.roster_exchange import Taken
from potluck.decoding import printable
from potluck.errors import HandshakeRefused
from potluck.messages import Introduction, Told
from potluck.net.incarnation import ThisProcess, this_process
from potluck.net.names import short_name
from potluck.net.namespace import NetworkNamespace, Protection
from potluck.net.namespace_files import UnknownNamespace
from potluck.net.security import Security
from potluck.vocabulary import NodeId

__all__ = ["Membership"]


class Membership:
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
        self._circle: Circle | None = None
        self._digest = b""
        self._met: set[NodeId] = {security.me}
        self.last_refusal: str | None = None
        """Why a node was turned away last, for the error of whoever waits for it in vain."""
        self.last_stranger: HandshakeRefused | None = None
        """The same of somebody who could not even show that it has the secret."""

    @classmethod
    def load(cls, namespace: NetworkNamespace | str | None = None) -> Membership:
        """Of the given namespace, or of the one this machine uses."""
        members = cls(Security.load(namespace))
        members.check()
        return members

    def check(self) -> None:
        """Raise now for what is damaged, or if we have no place, and not when somebody calls."""
        with self._lock:
            self._refresh()
        self.require_place()

    def require_place(self) -> None:
        """Raise if this machine has no place on the roster it goes by, and never had."""
        if circle := self.circle:
            circle.require_place()

    @property
    def me(self) -> NodeId:
        """Our own id."""
        return self.security.me

    @property
    def circle(self) -> Circle | None:
        """The circle as it is now; None where whoever has the secret belongs."""
        with self._lock:
            self._refresh()
            return self._circle

    @property
    def roster(self) -> Roster | None:
        """Its roster."""
        circle = self.circle
        return circle.roster if circle else None

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
    ) -> Granted | Exchange | Refused:
        """What to do with a caller that came under the secret of ``tag``."""
        if caller == self.me:
            known = self.introduction()
            if clone := judge_clone(caller, known, introduction, socket.gethostname()):
                return clone
        roster = self.roster
        is_current = self.security.is_current(tag)
        return judge_hello(roster, caller, introduction.roster, is_current=is_current)

    def judge_peer(self, peer: NodeId) -> Refused | None:
        """Whether a node is somebody to open a connection with, as far as we know."""
        return judge_peer(self.roster, peer)

    def refused_stranger(self, error: HandshakeRefused) -> None:
        """Remember somebody who called and did not get through TLS."""
        self.last_stranger = error

    # --- what is told ---

    def tell(self, peer: NodeId, tag: str) -> Told:
        """Our roster; and our secret, if the peer is a member who has come with an earlier one."""
        circle = self.circle
        if circle is None:
            return Told()
        return Told(circle.roster.to_bytes(), self._bequest(circle, peer, tag))

    def bequeath(self, peer: NodeId, tag: str) -> Told | None:
        """The secret alone, for a peer that came with an earlier one; None if there is none."""
        circle = self.circle
        secret = self._bequest(circle, peer, tag) if circle else b""
        return Told(secret=secret) if secret else None

    def _bequest(self, circle: Circle, peer: NodeId, tag: str) -> bytes:
        is_heir = circle.roster.is_member(peer) and circle.has_secret
        return circle.namespace.secret if is_heir and not self.security.is_current(tag) else b""

    def take(self, peer: NodeId, told: Told) -> Taken:
        """Merge what a peer has told, and keep the secret it has handed over."""
        circle = self.circle
        if circle is None:
            raise HandshakeRefused(
                "The other side goes by a roster, and this side has none",
                hint="Pair this machine: a secret that was copied by hand is not enough.",
            )
        offered = Roster.from_bytes(told.roster, VERIFIER)
        with self._lock:
            circle, taken = circle.take(offered, peer)
            if told.secret and circle.roster.is_secret(told.secret):
                circle = circle.inherit(told.secret)
            self._know(circle)
        return taken

    def inherit(self, secret: bytes) -> None:
        """Keep the secret that a peer has handed over."""
        circle = self.circle
        with self._lock:
            if circle is not None:
                self._know(circle.inherit(secret))

    def met(self, peer: NodeId) -> None:
        """A connection with a member has opened; both went by the same roster."""
        circle = self.circle
        if circle is None or peer in self._met:
            return
        self._met.add(peer)
        circle.namespace.mark_used()
        if not circle.roster.generation.members.keys() <= circle.roster.counted:
            with self._lock:  # it tells of the same members as we do, which may confirm some
                self._know(circle.take(circle.roster, peer)[0])

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
            if self._circle is None:
                raise
            return  # left meanwhile: this process ends with what it knew
        self._know(Circle.of(namespace, signer_of(self.security.identity)))

    def _know(self, circle: Circle) -> None:
        self._circle = circle
        self._digest = digest(circle.roster)
        self.security.renew(circle.namespace)
        self._seen = [_stamp(file) for file in self._files]


def _stamp(file: Path) -> tuple[int, int] | None:
    """Files are replaced, never changed, so each version has a number of its own."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
