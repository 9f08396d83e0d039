"""The side that shows the code: one code, a few tries, at most one pairing.

Strangers may connect; the code's life is what protects it.  Every exchange in which we sent our
share costs a try, however it ends, because it gave the other side one guess.  Only one such
exchange runs at a time; others are told that we are busy, which costs them nothing.  The table at
the end says which message is legal when; every other one ends its exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from potluck.core.cards import Card, Signer, Verifier
from potluck.core.pairing_code import PairingCode
from potluck.core.pairing_effects import (
    ANSWER_SECONDS,
    BAD_SHARES,
    CODE_SECONDS,
    MAX_LINKS,
    SENTENCES,
    STEP_SECONDS,
    TRIES,
    Effect,
    Ended,
    HangUp,
    Namespace,
    Paired,
    RefuseError,
    Send,
    TryFailed,
)
from potluck.core.pairing_keys import Box, Role, Session, ShareMaker
from potluck.core.pairing_messages import (
    PUBLIC_LIMIT,
    SEALED_LIMIT,
    VERSION,
    Accept,
    Admitted,
    Confirm,
    Decline,
    Hello,
    Offer,
    Refusal,
    Refused,
    Reply,
    Sealed,
    decode,
    decode_secret,
    encode,
)
from potluck.errors import MalformedFrame

__all__ = ["PairingHost"]


class _Stage(StrEnum):
    """What a link has to send next."""

    HELLO = "a hello"
    CONFIRM = "a proof of the code"
    ANSWER = "an answer to the offer"


@dataclass(slots=True)
class _Proved:
    """What is known once shares are exchanged."""

    hello: Hello
    session: Session
    inbox: Box
    outbox: Box


@dataclass(slots=True)
class _Exchange:
    """One connection."""

    link: int
    deadline: float
    stage: _Stage = _Stage.HELLO
    proved: _Proved | None = None  # set when we send our share: from then on it costs a try

    @property
    def who(self) -> str:
        """What the other side calls itself, in quotes because it may lie."""
        return f'"{self.proved.hello.name}"' if self.proved else "Somebody"


class PairingHost:
    """Shows ``code`` until somebody who knows it has joined, or its tries or its time are over.

    ``enrol`` is a pure function that returns the roster, as bytes, with the new machine on it.
    """

    def __init__(
        self,
        code: PairingCode,
        me: Signer,
        namespace: Namespace,
        *,
        enrol: Callable[[Card], bytes],
        verifier: Verifier,
        entropy: Callable[[int], bytes],
        now: float,
    ) -> None:
        self.code = code
        self.tries_left = TRIES
        self._bad_shares = 0
        self.is_over = False
        self._me = me
        self._namespace = namespace
        self._enrol = enrol
        self._verifier = verifier
        self._entropy = entropy
        self._expires = now + CODE_SECONDS
        self._exchanges: dict[int, _Exchange] = {}

    @property
    def deadline(self) -> float | None:
        """When :meth:`tick` is due."""
        if self.is_over:
            return None
        times = [exchange.deadline for exchange in self._exchanges.values()]
        # A guest who has proved the code may finish even if the code's time ends meanwhile.
        return min([*times, *([] if self._has(_Stage.ANSWER) else [self._expires])])

    def limit(self, link: int) -> int:
        """The most bytes the next message of this link may have."""
        exchange = self._exchanges.get(link)
        return SEALED_LIMIT if exchange and exchange.stage is _Stage.ANSWER else PUBLIC_LIMIT

    def connected(self, link: int, now: float) -> list[Effect]:
        """Somebody connected; ``link`` names the connection from now on."""
        effects = self.tick(now)
        if self.is_over:
            return [*effects, *_goodbye(link, Refusal.CODE_DEAD, "The code is no longer valid.")]
        if len(self._exchanges) >= MAX_LINKS:
            return [*effects, *_goodbye(link, Refusal.BUSY, "Too many connections at once.")]
        self._exchanges[link] = _Exchange(link, now + STEP_SECONDS)
        return effects

    def closed(self, link: int, now: float) -> list[Effect]:
        """The connection is gone."""
        effects = self.tick(now)
        exchange = self._exchanges.pop(link, None)
        if exchange is None:
            return effects
        return [*effects, *self._count(exchange, f"{exchange.who} hung up before the end.")]

    def receive(self, link: int, message: bytes, now: float) -> list[Effect]:
        """A message came in."""
        effects = self.tick(now)
        exchange = self._exchanges.get(link)
        if exchange is None:  # late bytes of a link that we have given up
            return effects
        try:
            decoded = decode(message, self.limit(link))
            step = self._STEPS.get((exchange.stage, type(decoded)))
            if step is None:
                text = (
                    f"{exchange.who} sent {type(decoded).__name__} where {exchange.stage} was due"
                )
                raise MalformedFrame(text)
            return [*effects, *step(self, exchange, decoded, message, now)]
        except MalformedFrame as error:
            return [*effects, *self._drop(link, Refusal.MALFORMED, str(error))]
        except RefuseError as error:
            return [*effects, *self._drop(link, error.why, str(error))]

    def tick(self, now: float) -> list[Effect]:
        """Let what is too old end."""
        effects: list[Effect] = []
        for link, exchange in list(self._exchanges.items()):
            if exchange.deadline <= now and not self.is_over:
                reason = f"{exchange.who} took too long to send {exchange.stage}."
                effects += self._drop(link, Refusal.TOO_SLOW, reason)
        if not self.is_over and now >= self._expires and not self._has(_Stage.ANSWER):
            effects += self._end(f"The code was valid for {CODE_SECONDS / 60:.0f} minutes.")
        return effects

    def cancel(self) -> list[Effect]:
        """The person here stopped it."""
        return [] if self.is_over else self._end("Pairing was stopped.")

    def _has(self, *stages: _Stage) -> bool:
        return any(exchange.stage in stages for exchange in self._exchanges.values())

    def _on_hello(self, exchange: _Exchange, hello: Hello, raw: bytes, now: float) -> list[Effect]:
        if hello.version != VERSION:
            text = f'"{hello.name}" speaks pairing version {hello.version}, we speak {VERSION}.'
            raise RefuseError(Refusal.VERSION, text)
        if hello.slot != self.code.slot:
            text = f'"{hello.name}" is looking for the code with the number {hello.slot}.'
            raise RefuseError(Refusal.WRONG_SLOT, text)
        if hello.node_id == self._me.node_id:
            raise RefuseError(Refusal.SAME_MACHINE, "This machine tried to pair with itself.")
        if self._has(_Stage.CONFIRM, _Stage.ANSWER):
            raise RefuseError(Refusal.BUSY, f'"{hello.name}" came while another was pairing.')
        if self._bad_shares >= BAD_SHARES:
            raise RefuseError(Refusal.BUSY, "Too many callers sent no valid share of the key.")
        maker = ShareMaker(Role.HOST, self.code, self._entropy)
        reply = encode(Reply(self._me.node_id, self._me.card.name, maker.share))
        try:
            session = maker.finish(hello.share, raw, reply)
        except MalformedFrame:
            self._bad_shares += 1  # it has learned nothing, and cost us milliseconds
            raise
        self.tries_left -= 1
        exchange.proved = _Proved(hello, session, session.inbox(), session.outbox())
        exchange.stage, exchange.deadline = _Stage.CONFIRM, now + STEP_SECONDS
        return [Send(reply, exchange.link)]

    def _on_confirm(
        self, exchange: _Exchange, confirm: Confirm, _raw: bytes, now: float
    ) -> list[Effect]:
        proved = exchange.proved
        assert proved is not None
        if not proved.session.is_proof_of_other(confirm.proof):
            raise RefuseError(Refusal.WRONG_CODE, f"{exchange.who} does not know the code.")
        exchange.stage, exchange.deadline = _Stage.ANSWER, now + ANSWER_SECONDS
        offer = Offer(
            self._namespace.name,
            self._namespace.secret,
            self._namespace.roster,
            self._me.card.public_key,
            self._me.sign(proved.session.identity_statement(Role.HOST)),
        )
        return [
            Send(encode(Confirm(proved.session.proof(Role.HOST))), exchange.link),
            Send(encode(Sealed(proved.outbox.seal(encode(offer)))), exchange.link),
        ]

    def _on_answer(
        self, exchange: _Exchange, sealed: Sealed, _raw: bytes, _now: float
    ) -> list[Effect]:
        assert exchange.proved is not None
        answer = decode_secret(exchange.proved.inbox.open(sealed.box))
        if isinstance(answer, Accept):
            return self._admit(exchange.link, exchange.proved, answer)
        if isinstance(answer, Decline):
            return self._end(f"{exchange.who} chose not to join.")
        raise MalformedFrame(f"{exchange.who} sealed {type(answer).__name__}, which is no answer")

    def _admit(self, link: int, proved: _Proved, accept: Accept) -> list[Effect]:
        card = Card(proved.hello.node_id, accept.public_key, proved.hello.name)
        statement = proved.session.identity_statement(Role.GUEST)
        if accept.node_id != card.node_id or not self._verifier.owns(
            card, accept.signature, statement
        ):
            text = f'"{card.name}" could not prove that its identity is its own.'
            raise RefuseError(Refusal.WRONG_IDENTITY, text)
        namespace = Namespace(self._namespace.name, self._namespace.secret, self._enrol(card))
        admitted = encode(Sealed(proved.outbox.seal(encode(Admitted(namespace.roster)))))
        del self._exchanges[link]
        reason = f'"{card.name}" joined "{namespace.name}".'
        return [
            Paired(card, namespace, reason),
            Send(admitted, link),
            HangUp(reason, link),
            *self._leave(),
        ]

    def _on_refused(
        self, exchange: _Exchange, refused: Refused, _raw: bytes, _now: float
    ) -> list[Effect]:
        return self._drop(exchange.link, None, SENTENCES[refused.why])

    def _drop(self, link: int, why: Refusal | None, reason: str) -> list[Effect]:
        exchange = self._exchanges.pop(link)
        return [*_goodbye(link, why, reason), *self._count(exchange, reason)]

    def _count(self, exchange: _Exchange, reason: str) -> list[Effect]:
        if exchange.proved is None:
            return []
        failed = TryFailed(reason, self.tries_left)
        return [failed] if self.tries_left else [failed, *self._end(f"All {TRIES} tries are used.")]

    def _end(self, reason: str) -> list[Effect]:
        return [*self._leave(), Ended(reason)]

    def _leave(self) -> list[Effect]:
        self.is_over = True
        links, self._exchanges = list(self._exchanges), {}
        return [
            effect
            for link in links
            for effect in _goodbye(link, Refusal.CODE_DEAD, "The code is no longer valid.")
        ]

    # (what is due, what came) -> what happens.  Any other pair is a fault of the other side.
    _STEPS: ClassVar[Mapping[tuple[_Stage, type], Callable[..., list[Effect]]]] = {
        (_Stage.HELLO, Hello): _on_hello,
        (_Stage.CONFIRM, Confirm): _on_confirm,
        (_Stage.ANSWER, Sealed): _on_answer,
        **dict.fromkeys(((stage, Refused) for stage in _Stage), _on_refused),
    }


def _goodbye(link: int, why: Refusal | None, reason: str) -> list[Effect]:
    return [*([Send(encode(Refused(why)), link)] if why else []), HangUp(reason, link)]
