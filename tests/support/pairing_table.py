"""A host and a guest of a pairing at one table, with somebody in between who may tamper."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from potluck._version import PROTOCOL as VERSION
from potluck.trust.pairing_code import parse_code
from potluck.trust.pairing_protocol import (
    Confirm,
    Effect,
    EncryptedMessage,
    HangUp,
    Message,
    Namespace,
    Offered,
    Paired,
    PairingEnded,
    PairingGuest,
    PairingHello,
    PairingHost,
    Reply,
    SendBytes,
)
from potluck.trust.roster_records import Signer
from support.machines import TOY_VERIFIER, entropy, machine

CODE = "7-guitar-harbor"
HOME = Namespace("home", bytes(range(32)), b"the roster")
DESKTOP = machine("desktop")
LAPTOP = machine("laptop")

To: TypeAlias = Literal["host", "guest"]
Tamper: TypeAlias = Callable[[To, bytes], list[tuple[To, bytes]]]
E = TypeVar("E")


def honest(to: To, message: bytes) -> list[tuple[To, bytes]]:
    """A cable."""
    return [(to, message)]


def make_host(code: str = CODE, me: Signer = DESKTOP, seed: int = 1, now: float = 0) -> PairingHost:
    """A machine that shows a code."""
    return PairingHost(
        parse_code(code),
        me,
        HOME,
        enrol=lambda card: b"the roster with " + card.name.encode(),
        verifier=TOY_VERIFIER,
        entropy=entropy(seed),
        now=now,
    )


def make_guest(code: str = CODE, me: Signer = LAPTOP, seed: int = 2) -> PairingGuest:
    """A machine on which somebody types a code."""
    return PairingGuest(parse_code(code), me, verifier=TOY_VERIFIER, entropy=entropy(seed))


def only(kind: type[E], effects: list[Effect]) -> E:
    """The single effect of this kind."""
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def sent(effects: list[Effect]) -> list[bytes]:
    """The messages among the effects."""
    return [effect.message for effect in effects if isinstance(effect, SendBytes)]


@dataclass
class Table:
    """One exchange, carried out until nobody has anything left to say."""

    host: PairingHost = field(default_factory=make_host)
    guest: PairingGuest = field(default_factory=make_guest)
    tamper: Tamper = honest
    link: int = 1
    now: float = 0.0
    accepts: bool = True
    host_effects: list[Effect] = field(default_factory=list)
    guest_effects: list[Effect] = field(default_factory=list)
    said: dict[To, list[bytes]] = field(default_factory=lambda: {"host": [], "guest": []})
    heard: dict[To, list[bytes]] = field(default_factory=lambda: {"host": [], "guest": []})
    _cable: deque[tuple[To, bytes]] = field(default_factory=deque)

    def run(self) -> Table:
        """Let them talk; returns the table itself."""
        self._from_host(self.host.connected(self.link, self.now))
        self._from_guest(self.guest.start(self.now))
        while self._cable:
            self._deliver(*self._cable.popleft())
        self._from_host(self.host.closed(self.link, self.now))
        self._from_guest(self.guest.closed(self.now))
        return self

    def outcome(self, side: To) -> Paired | None:
        """The pairing as this side sees it."""
        effects = self.host_effects if side == "host" else self.guest_effects
        return next((effect for effect in effects if isinstance(effect, Paired)), None)

    def _deliver(self, to: To, message: bytes) -> None:
        if self.outcome(to) is None:  # what a side hears afterwards cannot have persuaded it
            self.heard[to].append(message)
        if to == "host":
            self._from_host(self.host.receive(self.link, message, self.now))
        else:
            self._from_guest(self.guest.receive(message, self.now))

    def _from_host(self, effects: list[Effect]) -> None:
        self.host_effects += effects
        self._carry("guest", effects)

    def _from_guest(self, effects: list[Effect]) -> None:
        self.guest_effects += effects
        self._carry("host", effects)
        if any(isinstance(effect, Offered) for effect in effects):
            answer = self.guest.accept if self.accepts else self.guest.decline
            self._from_guest(answer(self.now))

    def _carry(self, to: To, effects: list[Effect]) -> None:
        for message in sent(effects):
            self.said["guest" if to == "host" else "host"].append(message)
            self._cable.extend(self.tamper(to, message))


def reason_of(effects: list[Effect]) -> str:
    """The sentence with which it ended."""
    return next(
        effect.reason for effect in reversed(effects) if isinstance(effect, PairingEnded | HangUp)
    )


def one_of_each() -> dict[str, Message]:
    """One message of each kind that could come at the wrong time."""
    return {
        "hello": PairingHello(VERSION, 7, LAPTOP.node_id, "x", bytes(33)),
        "reply": Reply(LAPTOP.node_id, "x", bytes(33)),
        "confirm": Confirm(bytes(32)),
        "sealed": EncryptedMessage(bytes(40)),
    }


def until_offer(host: PairingHost, guest: PairingGuest, now: float = 0) -> Offered:
    """Both have proved the code, on link 1, and the guest holds the offer."""
    host.connected(1, now)
    reply, *_ = sent(host.receive(1, sent(guest.start(now))[0], now))
    proof, *_ = sent(guest.receive(reply, now))
    confirm, offer = sent(host.receive(1, proof, now))
    assert guest.receive(confirm, now) == []
    return only(Offered, guest.receive(offer, now))
