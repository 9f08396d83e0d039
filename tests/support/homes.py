"""Machines that keep what they know on a disk of their own, and pair over real sockets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from potluck.identity.namespace import NetworkNamespace
from potluck.identity.node import NodeIdentity
from potluck.net.addresses import Address
from potluck.trust.membership_store import VERIFIER, NamespaceMembership, signer_of, write_roster
from potluck.trust.pairing import (
    NamespaceImporter,
    Notice,
    PairingFailed,
    PairingInvitation,
    PairingRequest,
    StoragePlan,
    open_listener,
)
from potluck.trust.pairing_code import parse_code
from potluck.trust.pairing_protocol import Offered, Paired, PairingGuest, SendBytes
from potluck.trust.roster import Roster, take
from support.threads import Background

CODE = "7-guitar-harbor"
WRONG = "7-guitar-harvest"


class Clock:
    """The time, which a test may push ahead."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        """Now."""
        return time.monotonic() + self._ahead

    def push(self, seconds: float) -> None:
        """Let so much time have passed."""
        self._ahead += seconds


class Home:
    """A machine: a directory for its files, a key, a name."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.me = signer_of(NodeIdentity.load_or_generate(self.path / "node_keypair"), name)

    def namespace(self, name: str = "home") -> NetworkNamespace:
        """A namespace kept here; made if there is none."""
        return NetworkNamespace.load_or_create(name, home=self.path)

    def membership(self, name: str = "home") -> NamespaceMembership:
        """Its group; founded if there is none."""
        return NamespaceMembership.of(self.namespace(name), self.me)

    def members(self, name: str = "home") -> list[str]:
        """The names on the roster here."""
        return [member.name for member in self.membership(name).roster.members]

    def join_records_of(self, other: Home, name: str = "home") -> None:
        """Merge the roster of another machine, as two members that connect would."""
        mine, theirs = self.membership(name), other.membership(name).roster.to_bytes()
        offered = Roster.from_bytes(theirs, VERIFIER)
        taken = take(mine.roster, offered, other.me.node_id, self.me.node_id)
        write_roster(mine.namespace, taken.roster)

    def join(self, where: Address, code: str = CODE, *, keep: bool = False) -> NamespaceMembership:
        """Type a code and say yes to whatever is asked; what this machine is in afterwards."""
        guest = Guest(self, keep=keep)
        outcome = guest.application(code).at([where])
        return guest.store(outcome)


class Guest:
    """Somebody who types a code; remembers what was planned and said."""

    def __init__(self, home: Home, name: str | None = None, *, keep: bool = False) -> None:
        self.home = home
        self.adopter = NamespaceImporter(home.path, home.me, name)
        self.plan: StoragePlan | None = None
        self.said: list[str] = []
        self._keep = keep

    def decide(self, offered: Offered) -> bool:
        """Yes."""
        self.plan = self.adopter.plan(offered, keep=self._keep)
        return True

    def application(
        self,
        code: str = CODE,
        *,
        decide: Callable[[Offered], bool] | None = None,
        pause: Callable[[float], None] = lambda _: None,
    ) -> PairingRequest:
        """The application; without pauses."""
        return PairingRequest(
            parse_code(code),
            self.home.me,
            decide or self.decide,
            tell=self.said.append,
            pause=pause,
        )

    def store(self, outcome: Paired) -> NamespaceMembership:
        """Carry out the plan."""
        assert self.plan is not None
        return self.adopter.store(self.plan, outcome)


class Hosting:
    """A machine that shows a code, on a thread of its own, until the test is over."""

    def __init__(
        self,
        home: Home,
        code: str = CODE,
        *,
        namespace: str = "home",
        tell: Callable[[Notice], None] | None = None,
    ) -> None:
        self.home = home
        self.clock = Clock()
        self.notices: list[Notice] = []
        self.listener = open_listener(port=0)
        self.where = Address("127.0.0.1", self.listener.port)
        invitation = PairingInvitation(
            home.membership(namespace),
            self.listener,
            parse_code(code),
            tell=tell or self.notices.append,
            clock=self.clock,
        )
        self.outcome = Background(invitation.run)

    @property
    def failures(self) -> list[str]:
        """Why tries failed."""
        return [notice.reason for notice in self.notices if hasattr(notice, "reason")]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clock.push(1e6)
        try:
            self.outcome.result()
        except PairingFailed:
            pass
        except BaseException:
            if kind is None:
                raise


def pair(host: Home, guest: Home, namespace: str = "home") -> None:
    """Bring two machines together."""
    with Hosting(host, namespace=namespace) as hosting:
        guest.join(hosting.where)
        hosting.outcome.result()


def call(where: Address, source: str = "127.0.0.1") -> socket.socket:
    """A bare connection to a host's port, from an address of this machine."""
    return socket.create_connection(where, timeout=10, source_address=(source, 0))


def framed(message: bytes) -> bytes:
    """A message of a pairing as it travels."""
    return len(message).to_bytes(4, "big") + message


def hello_of(home: Home, code: str = WRONG) -> bytes:
    """A first message as it should be, framed; whoever sends it need not know the code."""
    guest = PairingGuest(parse_code(code), home.me, verifier=VERIFIER, entropy=os.urandom)
    (effect,) = guest.start(0)
    assert isinstance(effect, SendBytes)
    return framed(effect.message)
