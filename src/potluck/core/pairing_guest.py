"""The side that types the code: one exchange with whoever answers.

The guest proves first that it knows the code, then asks the same of the other side, and believes
nothing before.  It keeps an offer to itself until ``accept`` or ``decline`` is called, because a
person may have to choose, and counts itself in only after the host has written it down.  What was
sent up to the reply gives nothing away, so until then the same code may be tried again; later
every attempt would give a machine in the middle another guess, so a person decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import ClassVar

from potluck.core.cards import Card, Signer, Verifier, clean_name
from potluck.core.pairing_code import PairingCode
from potluck.core.pairing_effects import (
    DECISION_SECONDS,
    SENTENCES,
    STEP_SECONDS,
    Effect,
    Ended,
    HangUp,
    Namespace,
    Offered,
    Paired,
    RefuseError,
    Send,
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
    Secret,
    decode,
    decode_secret,
    encode,
)
from potluck.errors import MalformedFrame, UnsupportedOperation

__all__ = ["PairingGuest"]


class _Stage(StrEnum):
    """What happens next, as the end of a sentence."""

    START = "nothing"
    REPLY = "a reply"
    CONFIRM = "a proof of the code"
    OFFER = "an offer"
    DECISION = "nothing before our answer"
    ADMITTED = "a confirmation that we are in"
    OVER = "nothing more"


class PairingGuest:
    """Joins the machine that shows ``code``.  Call :meth:`start`, then feed what comes in."""

    def __init__(
        self,
        code: PairingCode,
        me: Signer,
        *,
        verifier: Verifier,
        entropy: Callable[[int], bytes],
    ) -> None:
        self.deadline: float | None = None
        self._code = code
        self._me = me
        self._verifier = verifier
        self._stage = _Stage.START
        self._maker = ShareMaker(Role.GUEST, code, entropy)
        self._hello = encode(Hello(VERSION, code.slot, me.node_id, me.card.name, self._maker.share))
        self._reply: Reply
        self._session: Session
        self._inbox: Box
        self._outbox: Box
        self._offered: Offered

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known."""
        return self._stage is _Stage.OVER

    @property
    def limit(self) -> int:
        """The most bytes the next message may have."""
        sealed = self._stage in {_Stage.OFFER, _Stage.DECISION, _Stage.ADMITTED}
        return SEALED_LIMIT if sealed else PUBLIC_LIMIT

    def start(self, now: float) -> list[Effect]:
        """The connection stands."""
        if self._stage is not _Stage.START:
            raise UnsupportedOperation("This pairing has been started already")
        self._become(_Stage.REPLY, now + STEP_SECONDS)
        return [Send(self._hello)]

    def receive(self, message: bytes, now: float) -> list[Effect]:
        """A message came in."""
        effects = self.tick(now)
        if self.is_over:
            return effects
        try:
            decoded = decode(message, self.limit)
            step = self._STEPS.get((self._stage, type(decoded)))
            if step is None:
                text = f"The other side sent {type(decoded).__name__} where {self._stage} was due"
                raise MalformedFrame(text)
            return [*effects, *step(self, decoded, message, now)]
        except MalformedFrame as error:
            return [*effects, *self._fail(Refusal.MALFORMED, str(error))]
        except RefuseError as error:
            return [*effects, *self._fail(error.why, str(error))]

    def accept(self, now: float) -> list[Effect]:
        """Join what was offered."""
        if effects := self._decide(now):
            return effects
        signature = self._me.sign(self._session.identity_statement(Role.GUEST))
        self._become(_Stage.ADMITTED, now + 2 * STEP_SECONDS)  # the host writes to its disk
        return [self._seal(Accept(self._me.node_id, self._me.card.public_key, signature))]

    def decline(self, now: float) -> list[Effect]:
        """Stay out."""
        if effects := self._decide(now):
            return effects
        self._become(_Stage.OVER, None)
        reason = f'You chose not to join "{self._offered.namespace.name}".'
        return [self._seal(Decline()), HangUp(reason), Ended(reason)]

    def closed(self, now: float) -> list[Effect]:
        """The connection is gone."""
        if effects := self.tick(now):
            return effects
        if self.is_over:
            return []
        reason = f"The other machine hung up where {self._stage} was due."
        retry = self._stage in {_Stage.START, _Stage.REPLY}
        self._become(_Stage.OVER, None)
        return [Ended(reason, retry)]

    def tick(self, now: float) -> list[Effect]:
        """Give up if the other side, or the person here, took too long."""
        if self.deadline is None or now < self.deadline:
            return []
        if self._stage is _Stage.DECISION:
            return self._fail(Refusal.TOO_SLOW, "Nobody answered the question in time.")
        return self._fail(
            Refusal.TOO_SLOW, f"The other machine took too long to send {self._stage}."
        )

    def _on_reply(self, reply: Reply, raw: bytes, now: float) -> list[Effect]:
        if reply.node_id == self._me.node_id:
            raise RefuseError(Refusal.SAME_MACHINE, SENTENCES[Refusal.SAME_MACHINE])
        self._reply = reply
        self._session = self._maker.finish(reply.share, self._hello, raw)
        self._inbox, self._outbox = self._session.inbox(), self._session.outbox()
        self._become(_Stage.CONFIRM, now + STEP_SECONDS)
        return [Send(encode(Confirm(self._session.proof(Role.GUEST))))]

    def _on_confirm(self, confirm: Confirm, _raw: bytes, now: float) -> list[Effect]:
        if not self._session.is_proof_of_other(confirm.proof):
            text = "The machine that answered does not know the code; somebody may be in between."
            raise RefuseError(Refusal.WRONG_CODE, text)
        self._become(_Stage.OFFER, now + STEP_SECONDS)
        return []

    def _on_offer(self, sealed: Sealed, _raw: bytes, now: float) -> list[Effect]:
        offer = self._open(sealed)
        if not isinstance(offer, Offer) or offer.namespace != clean_name(offer.namespace):
            raise MalformedFrame("The other side sealed something that is not an offer")
        card = Card(self._reply.node_id, offer.public_key, self._reply.name)
        statement = self._session.identity_statement(Role.HOST)
        if not self._verifier.owns(card, offer.signature, statement):
            text = f'"{card.name}" could not prove that its identity is its own.'
            raise RefuseError(Refusal.WRONG_IDENTITY, text)
        self._offered = Offered(card, Namespace(offer.namespace, offer.secret, offer.roster))
        self._become(_Stage.DECISION, now + DECISION_SECONDS)
        return [self._offered]

    def _on_admitted(self, sealed: Sealed, _raw: bytes, _now: float) -> list[Effect]:
        admitted = self._open(sealed)
        if not isinstance(admitted, Admitted):
            raise MalformedFrame("The other side sealed something that does not let us in")
        peer, offered = self._offered.peer, self._offered.namespace
        namespace = Namespace(offered.name, offered.secret, admitted.roster)
        reason = f'This machine joined "{namespace.name}" through "{peer.name}".'
        self._become(_Stage.OVER, None)
        return [Paired(peer, namespace, reason), HangUp(reason)]

    def _on_refused(self, refused: Refused, _raw: bytes, _now: float) -> list[Effect]:
        retry = refused.why is Refusal.BUSY and self._stage is _Stage.REPLY
        return self._fail(None, SENTENCES[refused.why], retry=retry)

    def _decide(self, now: float) -> list[Effect]:
        effects = self.tick(now)
        if not effects and self._stage is not _Stage.DECISION:
            raise UnsupportedOperation("There is no offer to answer")
        return effects

    def _seal(self, message: Secret) -> Send:
        return Send(encode(Sealed(self._outbox.seal(encode(message)))))

    def _open(self, sealed: Sealed) -> Secret:
        return decode_secret(self._inbox.open(sealed.box))

    def _fail(self, why: Refusal | None, reason: str, *, retry: bool = False) -> list[Effect]:
        self._become(_Stage.OVER, None)
        told = [Send(encode(Refused(why)))] if why else []
        return [*told, HangUp(reason), Ended(reason, retry)]

    def _become(self, stage: _Stage, deadline: float | None) -> None:
        self._stage, self.deadline = stage, deadline

    # (what is due, what came) -> what happens.  Any other pair is a fault of the other side.
    _STEPS: ClassVar[Mapping[tuple[_Stage, type], Callable[..., list[Effect]]]] = {
        (_Stage.REPLY, Reply): _on_reply,
        (_Stage.CONFIRM, Confirm): _on_confirm,
        (_Stage.OFFER, Sealed): _on_offer,
        (_Stage.ADMITTED, Sealed): _on_admitted,
        **dict.fromkeys(((stage, Refused) for stage in _Stage), _on_refused),
    }
