"""Pairing: two machines that share nothing but a short code become members of one namespace.

``potluck pair`` drives a :class:`PairingHost` and shows its code; ``potluck pair CODE`` drives a
:class:`PairingGuest`.  Both are pure: bytes and the time in, effects out, chance and keys passed
in.  The messages are listed in :mod:`potluck.trust.pairing_protocol`.

What holds, as long as the code reaches only the right person:

* An eavesdropper learns neither the code nor the secret, now or later: SPAKE2 leaves nothing to
  search through.  It does see both ids and display names, which discovery shows as well.
* A machine in the middle has one guess in each exchange.  The host allows three, the guest starts
  one for each time a person types the code; neither side completes on a wrong guess.
* Each side proves knowledge of the code and possession of its node key, in this very exchange:
  what was recorded elsewhere or sent by ourselves fails.  The host offers the namespace only after
  the guest's proof, the guest counts itself in only after the host has written it down.
* A stranger can use up the three tries, so that a new code is needed; it gains nothing by that.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from potluck._decode import msgpack_reader
from potluck._version import THIS_BUILD, UPGRADE, Build, VersionMismatch
from potluck.errors import MalformedFrame, UnsupportedOperation
from potluck.trust.pairing_code import PairingCode
from potluck.trust.roster_records import (
    Card,
    Digest,
    PublicKey,
    Signature,
    Signer,
    Verifier,
    WireId,
    WireName,
    clean_name,
)

# --------------------------------------------------------------------------------------------------
# The messages of a pairing: typed, bounded, and decoded only when small.
#
# ::
#
#     guest → host   Hello      version, slot, who I am, my SPAKE2 share
#     host → guest   Reply      who I am, my SPAKE2 share                     (this costs a try)
#     guest → host   Confirm    proof that I know the code
#     host → guest   Confirm    the same, only after the guest's was right
#     host → guest   Encrypted(Offer)      the namespace, and proof that my id is mine
#     guest → host   Encrypted(Accept)     proof that my id is mine        (or Encrypted(Decline))
#     host → guest   Encrypted(Admitted)   the roster with the guest on it
#     either way     Refused    why not, as a word from a fixed list
#
# Public messages have at most 4 KiB, encrypted ones 64 KiB.  A refusal carries no free text: before
# the code is proved anybody may have sent it, and a stranger writes nothing on our terminal.

PUBLIC_LIMIT = 4 << 10  # bytes of a message before the code is proved; the largest has about 400
ENCRYPTED_LIMIT = 64 << 10  # bytes of a message afterwards
ROSTER_LIMIT = 60 << 10  # bytes; leaves room for the rest of an offer and the encryption

_Share = Annotated[bytes, msgspec.Meta(min_length=33, max_length=33)]  # side and Ed25519 point
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Slot = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
_Roster = Annotated[bytes, msgspec.Meta(max_length=ROSTER_LIMIT)]


class Refusal(StrEnum):
    """Why a side ends the exchange."""

    BUSY = "busy"
    CODE_DEAD = "code-dead"
    MALFORMED = "malformed"
    SAME_MACHINE = "same-machine"
    TOO_SLOW = "too-slow"
    VERSION = "version"
    WRONG_CODE = "wrong-code"
    WRONG_IDENTITY = "wrong-identity"
    WRONG_SLOT = "wrong-slot"


class _Message(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    """A later version may add fields, which this one ignores."""


def kind_of(message: _Message) -> str:
    """The name of a message on the wire, for an error."""
    return str(message.__struct_config__.tag)


class PairingHello(_Message, tag="hello", frozen=True):
    """The guest's first message."""

    version: int
    """The newest version of the protocol that it speaks."""
    slot: _Slot
    node_id: WireId
    name: WireName
    share: _Share
    oldest: _Number = 0
    """The oldest one; 0 if it speaks no other."""
    potluck: _Number = 0
    """Its version of Potluck, as a number: a stranger writes nothing on our terminal."""

    @property
    def build(self) -> Build:
        """What it runs."""
        return Build.read(self.potluck, self.version, self.oldest or self.version)


class Reply(_Message, tag="reply", frozen=True):
    """The host's half of the key exchange."""

    node_id: WireId
    name: WireName
    share: _Share


class Confirm(_Message, tag="confirm", frozen=True):
    """A MAC over the whole exchange under the key that only the code gives."""

    proof: Digest


class EncryptedMessage(_Message, tag="sealed", frozen=True):
    """An encrypted message."""

    box: bytes


class PairingRefused(_Message, tag="refused", frozen=True):
    """The sender ends the exchange."""

    why: Refusal
    version: _Number = 0
    oldest: _Number = 0
    potluck: _Number = 0
    """What the sender runs, where that is why."""

    @classmethod
    def of_version(cls, build: Build) -> PairingRefused:
        """Refuse because of what each side runs."""
        return cls(Refusal.VERSION, build.protocol, build.oldest, build.number)

    @property
    def build(self) -> Build | None:
        """What the sender runs, if it says so."""
        found = Build.read(self.potluck, self.version, self.oldest or self.version)
        return found if self.version else None


class NamespaceOffer(_Message, tag="offer", frozen=True):
    """The namespace; ``signature`` proves that the host's id is the host's."""

    namespace: WireName
    secret: Digest
    roster: _Roster
    public_key: PublicKey
    signature: Signature

    def __repr__(self) -> str:
        return f"NamespaceOffer(namespace={self.namespace!r})"  # the secret stays out of logs


class Accept(_Message, tag="accept", frozen=True):
    """The guest joins; ``signature`` proves that its id is its own."""

    node_id: WireId
    public_key: PublicKey
    signature: Signature


class Decline(_Message, tag="decline", frozen=True):
    """The person at the guest declined."""


class Admitted(_Message, tag="admitted", frozen=True):
    """The host has added the guest to its roster."""

    roster: _Roster


Message: TypeAlias = PairingHello | Reply | Confirm | EncryptedMessage | PairingRefused
Secret: TypeAlias = NamespaceOffer | Accept | Decline | Admitted

# msgspec reports text that is not UTF-8 with Python's own UnicodeDecodeError, a ValueError.
_NOT_OURS = (msgspec.MsgspecError, ValueError, RecursionError)

_encode = msgspec.msgpack.Encoder().encode
_decode_message: Callable[[bytes], Message] = msgpack_reader(Message).decode
_decode_secret: Callable[[bytes], Secret] = msgpack_reader(Secret).decode


def encode(message: Message | Secret) -> bytes:
    """The message as bytes."""
    return _encode(message)


def decode(data: bytes, limit: int) -> Message:
    """The message in ``data``; its size is checked first.  Raises :class:`MalformedFrame`."""
    if len(data) > limit:
        raise MalformedFrame(
            f"A pairing message of {len(data)} bytes came where at most {limit} are allowed",
            expected=limit,
            got=len(data),
        )
    try:
        message = _decode_message(data)
    except _NOT_OURS as error:
        raise _not_ours() from error
    if isinstance(message, PairingHello | Reply) and message.name != clean_name(message.name):
        raise MalformedFrame("A machine sent a name with unprintable characters")
    return message


def decode_secret(data: bytes) -> Secret:
    """The message that was encrypted; its size was checked before."""
    try:
        return _decode_secret(data)
    except _NOT_OURS as error:
        raise _not_ours() from error


def _not_ours() -> MalformedFrame:
    # The decoder's own words are left out: they quote what a stranger sent.
    return MalformedFrame(
        "The other side does not use our pairing protocol",
        hint=f"If its version of Potluck differs, upgrade the older one: {UPGRADE}",
    )


# --------------------------------------------------------------------------------------------------
# What the two pairing machines ask their driver to do, and the sentences people read.
#
# Effects are carried out in the order they are given: a :class:`Paired` comes before the message
# that tells the other side, so that what was agreed is on disk before anybody relies on it.

TRIES = 3  # exchanges in which the host sent its share
BAD_SHARES = 64  # shares that are none, each of which takes milliseconds to find out
CODE_SECONDS = 300.0  # how long a code lives
STEP_SECONDS = 5.0  # for a machine to send its next message; one takes 20 ms of arithmetic
ANSWER_SECONDS = 120.0  # for a person to read the offer and answer
DECISION_SECONDS = 110.0  # the guest gives up first, so that it can still say so
MAX_LINKS = 8  # connections at a time that may wait for their turn

_SECRET_SIZE = 32  # bytes


@dataclass(frozen=True, slots=True)
class Namespace:
    """What a pairing hands over: a group's name, its secret, and its roster as bytes."""

    name: str
    secret: bytes = field(repr=False)
    roster: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.name != clean_name(self.name):
            msg = f"{self.name!r} cannot be shown as the name of a namespace"
            raise ValueError(msg)
        if len(self.secret) != _SECRET_SIZE:
            msg = f"A namespace's secret has {_SECRET_SIZE} bytes, not {len(self.secret)}"
            raise ValueError(msg)
        if len(self.roster) > ROSTER_LIMIT:
            msg = f"A roster of {len(self.roster)} bytes is too large; {ROSTER_LIMIT} are allowed"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class SendBytes:
    """Send these bytes as one message (the guest has only link 0)."""

    message: bytes = field(repr=False)
    link: int = 0


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection once what was sent is out."""

    reason: str
    link: int = 0


@dataclass(frozen=True, slots=True)
class TryFailed:
    """A try of the code is used up; the person at the host is told."""

    reason: str
    tries_left: int


@dataclass(frozen=True, slots=True)
class CallerDiffers:
    """A machine called whose version cannot pair with this one; the person at the host is told."""

    reason: str


@dataclass(frozen=True, slots=True)
class Offered:
    """The guest has a verified offer: decide, then call ``accept`` or ``decline``."""

    peer: Card
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Paired:
    """Done.  Store the namespace (its roster has both machines) before the next effect."""

    peer: Card
    namespace: Namespace
    reason: str


@dataclass(frozen=True, slots=True)
class PairingEnded:
    """The pairing failed.  ``retry``: the same code may be tried again without asking the user."""

    reason: str
    retry: bool = False


Effect: TypeAlias = SendBytes | HangUp | TryFailed | CallerDiffers | Offered | Paired | PairingEnded


class RefuseError(Exception):
    """Ends an exchange: ``why`` goes to the other side, the text to the person here."""

    def __init__(self, why: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.why = why


# What a refusal means to the side that receives it.
SENTENCES = MappingProxyType(
    {
        Refusal.BUSY: "The other machine is pairing with another one right now.",
        Refusal.CODE_DEAD: "The code is no longer valid; run `potluck pair` there for a new one.",
        Refusal.MALFORMED: "The other machine could not read our message; "
        "upgrade Potluck on the older one: "
        f"{UPGRADE}",
        Refusal.SAME_MACHINE: "Both ends of this pairing are the same machine.",
        Refusal.TOO_SLOW: "The other machine gave up waiting for this one.",
        Refusal.VERSION: "The other machine uses a version of Potluck that cannot pair with this "
        f"one; upgrade the older one: {UPGRADE}",
        Refusal.WRONG_CODE: "The other machine did not accept the code; read it once more, "
        "or run `potluck pair` there for a new one.",
        Refusal.WRONG_IDENTITY: "The other machine could not check our identity.",
        Refusal.WRONG_SLOT: "The machine that answered shows another code; check the number.",
    }
)


# --------------------------------------------------------------------------------------------------
# The cryptography of pairing: SPAKE2, and everything derived from its key.
#
# SPAKE2 turns the short code into a strong key that an eavesdropper cannot search for, and gives a
# machine in the middle one guess for each exchange.  The asymmetric form is used, guest as side A
# and host as side B, because the roles differ anyway: a reflected share then fails at once.
#
# The key is bound to the *transcript*, the exact bytes of hello and reply (version, slot, both ids,
# both names, both shares): two sides that saw different bytes derive different keys.  Keys differ
# by direction and purpose, and encrypted messages are numbered, so nothing can be replayed or
# reflected. Every function is pure; chance is passed in as ``entropy``.

_LABEL = b"potluck pairing v1 "
_KEY = 32  # bytes of every key and MAC


class PairingRole(StrEnum):
    """The two sides."""

    GUEST = "guest"
    HOST = "host"

    @property
    def other(self) -> PairingRole:
        """The other side."""
        return PairingRole.HOST if self is PairingRole.GUEST else PairingRole.GUEST


class ShareMaker:
    """One SPAKE2 run: makes our share and turns the other's into a session.  Used once."""

    def __init__(
        self, role: PairingRole, code: PairingCode, entropy: Callable[[int], bytes]
    ) -> None:
        import spake2  # type: ignore[import-untyped]  # 0.1 s, so only for a pairing

        side = spake2.SPAKE2_A if role is PairingRole.GUEST else spake2.SPAKE2_B
        self._role = role
        self._run: Any = side(
            code.password, idA=_LABEL + b"guest", idB=_LABEL + b"host", entropy_f=entropy
        )
        self.share: bytes = self._run.start()

    def finish(self, share: bytes, hello: bytes, reply: bytes) -> PairingSession:
        """The session with the sender of ``share``; raises MalformedFrame for an invalid one."""
        import spake2
        from spake2.ed25519_basic import NotOnCurve  # type: ignore[import-untyped]

        try:
            key: bytes = self._run.finish(share)
        except (spake2.SPAKEError, NotOnCurve, ValueError) as error:
            raise MalformedFrame(
                "The other side's share of the key is not valid", cause=str(error) or None
            ) from error
        return PairingSession(self._role, key, _transcript(hello, reply))


@dataclass(frozen=True)
class PairingSession:
    """What one side can do once both shares are exchanged."""

    role: PairingRole
    key: bytes = field(repr=False)
    transcript: bytes = field(repr=False)

    def proof(self, role: PairingRole) -> bytes:
        """The MAC by which ``role`` proves that it knows the code."""
        return hmac.digest(self._derive(f"confirm {role}"), self.transcript, "sha256")

    def is_proof_of_other(self, proof: bytes) -> bool:
        """Whether the other side knows the code."""
        return hmac.compare_digest(proof, self.proof(self.role.other))

    def identity_statement(self, role: PairingRole) -> bytes:
        """What ``role`` signs with its node key: good for this one exchange and this role."""
        return _LABEL + f"identity {role} ".encode() + self._derive("identity")

    def outbox(self) -> Box:
        """Encrypts what we send."""
        return self._box(self.role)

    def inbox(self) -> Box:
        """Decrypts what the other sends."""
        return self._box(self.role.other)

    def _box(self, sender: PairingRole) -> Box:
        return Box(self._derive(f"seal {sender}"), self.transcript)

    def _derive(self, purpose: str) -> bytes:
        # HKDF with one block: extract with the transcript as salt, expand with the purpose.
        strong = hmac.digest(self.transcript, self.key, "sha256")
        return hmac.digest(strong, _LABEL + purpose.encode() + b"\x01", "sha256")[:_KEY]


class Box:
    """Numbered AES-256-GCM in one direction; a key used for a handful of messages."""

    def __init__(self, key: bytes, transcript: bytes) -> None:
        self._cipher = AESGCM(key)
        self._transcript = transcript
        self._count = 0

    def encrypt(self, message: bytes) -> bytes:
        """The message, readable only by the other side and only in this place of the sequence."""
        return self._cipher.encrypt(self._nonce(), message, self._transcript)

    def decrypt(self, box: bytes) -> bytes:
        """The message in ``box``; raises MalformedFrame if a bit or its place is wrong."""
        try:
            return self._cipher.decrypt(self._nonce(), box, self._transcript)
        except (InvalidTag, ValueError) as error:  # ValueError: shorter than a tag
            raise MalformedFrame(
                "An encrypted pairing message was damaged or out of order"
            ) from error

    def _nonce(self) -> bytes:
        # The number advances even if decryption fails; a broken sequence is never resumed.
        self._count += 1
        return self._count.to_bytes(12, "big")


def _transcript(hello: bytes, reply: bytes) -> bytes:
    # Each part is preceded by its length, so that no bytes can move from one to the other.
    parts = b"".join(len(part).to_bytes(4, "big") + part for part in (hello, reply))
    return hashlib.sha256(_LABEL + parts).digest()


# --------------------------------------------------------------------------------------------------
# The side that shows the code: one code, a few tries, at most one pairing.
#
# Strangers may connect; the code's life is what protects it.  Every exchange in which we sent our
# share costs a try, however it ends, because it gave the other side one guess.  Only one such
# exchange runs at a time; others are told that we are busy, which costs them nothing.  The table at
# the end says which message is legal when; every other one ends its exchange.


class _Stage(StrEnum):
    """What a link has to send next."""

    HELLO = "a hello"
    CONFIRM = "a proof of the code"
    ANSWER = "an answer to the offer"


@dataclass(slots=True)
class _Proved:
    """What is known once shares are exchanged."""

    hello: PairingHello
    session: PairingSession
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
        return f'"{self.proved.hello.name}"' if self.proved else "A caller"


class PairingHost:
    """Shows ``code`` until a machine that knows it has joined, or its tries or its time are over.

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
        self._strangers = 0  # callers of versions that cannot pair with this one
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
        return ENCRYPTED_LIMIT if exchange and exchange.stage is _Stage.ANSWER else PUBLIC_LIMIT

    def connected(self, link: int, now: float) -> list[Effect]:
        """A machine has connected; ``link`` is the number of the connection from now on."""
        effects = self.tick(now)
        if self.is_over:
            return [*effects, *_ended(link, Refusal.CODE_DEAD, "The code is no longer valid.")]
        if len(self._exchanges) >= MAX_LINKS:
            return [*effects, *_ended(link, Refusal.BUSY, "Too many connections at once.")]
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
                text = f"{exchange.who} sent {kind_of(decoded)} where {exchange.stage} was due"
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

    def _on_hello(
        self, exchange: _Exchange, hello: PairingHello, raw: bytes, now: float
    ) -> list[Effect]:
        if THIS_BUILD.agreed(hello.build) is None:
            return self._differ(exchange.link, hello)
        if hello.slot != self.code.slot:
            text = f'"{hello.name}" is looking for the code with the number {hello.slot}.'
            raise RefuseError(Refusal.WRONG_SLOT, text)
        if hello.node_id == self._me.node_id:
            raise RefuseError(Refusal.SAME_MACHINE, "This machine tried to pair with itself.")
        if self._has(_Stage.CONFIRM, _Stage.ANSWER):
            raise RefuseError(
                Refusal.BUSY, f'"{hello.name}" called while another machine was pairing.'
            )
        if self._bad_shares >= BAD_SHARES:
            raise RefuseError(Refusal.BUSY, "Too many callers sent an invalid share of the key.")
        maker = ShareMaker(PairingRole.HOST, self.code, self._entropy)
        reply = encode(Reply(self._me.node_id, self._me.card.name, maker.share))
        try:
            session = maker.finish(hello.share, raw, reply)
        except MalformedFrame:
            self._bad_shares += 1  # it has learned nothing, and cost us milliseconds
            raise
        self.tries_left -= 1
        exchange.proved = _Proved(hello, session, session.inbox(), session.outbox())
        exchange.stage, exchange.deadline = _Stage.CONFIRM, now + STEP_SECONDS
        return [SendBytes(reply, exchange.link)]

    def _on_confirm(
        self, exchange: _Exchange, confirm: Confirm, _raw: bytes, now: float
    ) -> list[Effect]:
        proved = exchange.proved
        assert proved is not None
        if not proved.session.is_proof_of_other(confirm.proof):
            raise RefuseError(Refusal.WRONG_CODE, f"{exchange.who} does not know the code.")
        exchange.stage, exchange.deadline = _Stage.ANSWER, now + ANSWER_SECONDS
        offer = NamespaceOffer(
            self._namespace.name,
            self._namespace.secret,
            self._namespace.roster,
            self._me.card.public_key,
            self._me.sign(proved.session.identity_statement(PairingRole.HOST)),
        )
        return [
            SendBytes(encode(Confirm(proved.session.proof(PairingRole.HOST))), exchange.link),
            SendBytes(
                encode(EncryptedMessage(proved.outbox.encrypt(encode(offer)))), exchange.link
            ),
        ]

    def _on_answer(
        self, exchange: _Exchange, encrypted: EncryptedMessage, _raw: bytes, _now: float
    ) -> list[Effect]:
        assert exchange.proved is not None
        answer = decode_secret(exchange.proved.inbox.decrypt(encrypted.box))
        if isinstance(answer, Accept):
            return self._admit(exchange.link, exchange.proved, answer)
        if isinstance(answer, Decline):
            return self._end(f"{exchange.who} chose not to join.")
        raise MalformedFrame(f"{exchange.who} sent {kind_of(answer)} where an answer was due")

    def _admit(self, link: int, proved: _Proved, accept: Accept) -> list[Effect]:
        card = Card(proved.hello.node_id, accept.public_key, proved.hello.name)
        statement = proved.session.identity_statement(PairingRole.GUEST)
        if accept.node_id != card.node_id or not self._verifier.owns(
            card, accept.signature, statement
        ):
            text = f'"{card.name}" could not prove that its identity is its own.'
            raise RefuseError(Refusal.WRONG_IDENTITY, text)
        namespace = Namespace(self._namespace.name, self._namespace.secret, self._enrol(card))
        admitted = encode(
            EncryptedMessage(proved.outbox.encrypt(encode(Admitted(namespace.roster))))
        )
        del self._exchanges[link]
        reason = f'"{card.name}" joined "{namespace.name}".'
        return [
            Paired(card, namespace, reason),
            SendBytes(admitted, link),
            HangUp(reason, link),
            *self._leave(),
        ]

    def _on_refused(
        self, exchange: _Exchange, refused: PairingRefused, _raw: bytes, _now: float
    ) -> list[Effect]:
        return self._drop(exchange.link, None, SENTENCES[refused.why])

    def _differ(self, link: int, hello: PairingHello) -> list[Effect]:
        """No protocol version is common: both people are told, the one here a few times at most."""
        del self._exchanges[link]
        reason = str(
            VersionMismatch(self._me.card.name, THIS_BUILD, f'"{hello.name}"', hello.build)
        )
        self._strangers += 1
        told = [CallerDiffers(reason)] if self._strangers <= TRIES else []
        refused = SendBytes(encode(PairingRefused.of_version(THIS_BUILD)), link)
        return [*told, refused, HangUp(reason, link)]

    def _drop(self, link: int, why: Refusal | None, reason: str) -> list[Effect]:
        exchange = self._exchanges.pop(link)
        return [*_ended(link, why, reason), *self._count(exchange, reason)]

    def _count(self, exchange: _Exchange, reason: str) -> list[Effect]:
        if exchange.proved is None:
            return []
        failed = TryFailed(reason, self.tries_left)
        return [failed] if self.tries_left else [failed, *self._end(f"All {TRIES} tries are used.")]

    def _end(self, reason: str) -> list[Effect]:
        return [*self._leave(), PairingEnded(reason)]

    def _leave(self) -> list[Effect]:
        self.is_over = True
        links, self._exchanges = list(self._exchanges), {}
        return [
            effect
            for link in links
            for effect in _ended(link, Refusal.CODE_DEAD, "The code is no longer valid.")
        ]

    # (what is due, what came) -> what happens.  Any other pair is a fault of the other side.
    _STEPS: ClassVar[Mapping[tuple[_Stage, type], Callable[..., list[Effect]]]] = {
        (_Stage.HELLO, PairingHello): _on_hello,
        (_Stage.CONFIRM, Confirm): _on_confirm,
        (_Stage.ANSWER, EncryptedMessage): _on_answer,
        **dict.fromkeys(((stage, PairingRefused) for stage in _Stage), _on_refused),
    }


def _ended(link: int, why: Refusal | None, reason: str) -> list[Effect]:
    return [*([SendBytes(encode(PairingRefused(why)), link)] if why else []), HangUp(reason, link)]


# --------------------------------------------------------------------------------------------------
# The side that types the code: one exchange with the machine that answers.
#
# The guest proves first that it knows the code, then asks the same of the other side, and believes
# nothing before.  It keeps an offer to itself until ``accept`` or ``decline`` is called, because a
# person may have to choose, and counts itself in only after the host has written it down.  What was
# sent up to the reply gives nothing away, so until then the same code may be tried again; later
# every attempt would give a machine in the middle another guess, so a person decides.


class _GuestStage(StrEnum):
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
        self._stage = _GuestStage.START
        self._maker = ShareMaker(PairingRole.GUEST, code, entropy)
        self._hello = encode(
            PairingHello(
                THIS_BUILD.protocol,
                code.slot,
                me.node_id,
                me.card.name,
                self._maker.share,
                THIS_BUILD.oldest,
                THIS_BUILD.number,
            )
        )
        self._reply: Reply
        self._session: PairingSession
        self._inbox: Box
        self._outbox: Box
        self._offered: Offered

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known."""
        return self._stage is _GuestStage.OVER

    @property
    def limit(self) -> int:
        """The most bytes the next message may have."""
        is_encrypted = self._stage in {
            _GuestStage.OFFER,
            _GuestStage.DECISION,
            _GuestStage.ADMITTED,
        }
        return ENCRYPTED_LIMIT if is_encrypted else PUBLIC_LIMIT

    def start(self, now: float) -> list[Effect]:
        """The connection is open."""
        if self._stage is not _GuestStage.START:
            raise UnsupportedOperation("This pairing has been started already")
        self._become(_GuestStage.REPLY, now + STEP_SECONDS)
        return [SendBytes(self._hello)]

    def receive(self, message: bytes, now: float) -> list[Effect]:
        """A message came in."""
        effects = self.tick(now)
        if self.is_over:
            return effects
        try:
            decoded = decode(message, self.limit)
            step = self._STEPS.get((self._stage, type(decoded)))
            if step is None:
                text = f"The other side sent {kind_of(decoded)} where {self._stage} was due"
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
        signature = self._me.sign(self._session.identity_statement(PairingRole.GUEST))
        self._become(_GuestStage.ADMITTED, now + 2 * STEP_SECONDS)  # the host writes to its disk
        return [self._encrypted(Accept(self._me.node_id, self._me.card.public_key, signature))]

    def decline(self, now: float) -> list[Effect]:
        """Decline the offer."""
        if effects := self._decide(now):
            return effects
        self._become(_GuestStage.OVER, None)
        reason = f'You chose not to join "{self._offered.namespace.name}".'
        return [self._encrypted(Decline()), HangUp(reason), PairingEnded(reason)]

    def closed(self, now: float) -> list[Effect]:
        """The connection is gone."""
        if effects := self.tick(now):
            return effects
        if self.is_over:
            return []
        reason = f"The other machine hung up where {self._stage} was due."
        retry = self._stage in {_GuestStage.START, _GuestStage.REPLY}
        self._become(_GuestStage.OVER, None)
        return [PairingEnded(reason, retry)]

    def tick(self, now: float) -> list[Effect]:
        """Give up if the other side, or the person here, took too long."""
        if self.deadline is None or now < self.deadline:
            return []
        if self._stage is _GuestStage.DECISION:
            return self._fail(Refusal.TOO_SLOW, "The question was not answered in time.")
        return self._fail(
            Refusal.TOO_SLOW, f"The other machine took too long to send {self._stage}."
        )

    def _on_reply(self, reply: Reply, raw: bytes, now: float) -> list[Effect]:
        if reply.node_id == self._me.node_id:
            raise RefuseError(Refusal.SAME_MACHINE, SENTENCES[Refusal.SAME_MACHINE])
        self._reply = reply
        self._session = self._maker.finish(reply.share, self._hello, raw)
        self._inbox, self._outbox = self._session.inbox(), self._session.outbox()
        self._become(_GuestStage.CONFIRM, now + STEP_SECONDS)
        return [SendBytes(encode(Confirm(self._session.proof(PairingRole.GUEST))))]

    def _on_confirm(self, confirm: Confirm, _raw: bytes, now: float) -> list[Effect]:
        if not self._session.is_proof_of_other(confirm.proof):
            text = "The machine that answered does not know the code; it may be an attacker."
            raise RefuseError(Refusal.WRONG_CODE, text)
        self._become(_GuestStage.OFFER, now + STEP_SECONDS)
        return []

    def _on_offer(self, encrypted: EncryptedMessage, _raw: bytes, now: float) -> list[Effect]:
        offer = self._decrypted(encrypted)
        if not isinstance(offer, NamespaceOffer) or offer.namespace != clean_name(offer.namespace):
            raise MalformedFrame("The other side encrypted a message that is not an offer")
        card = Card(self._reply.node_id, offer.public_key, self._reply.name)
        statement = self._session.identity_statement(PairingRole.HOST)
        if not self._verifier.owns(card, offer.signature, statement):
            text = f'"{card.name}" could not prove that its identity is its own.'
            raise RefuseError(Refusal.WRONG_IDENTITY, text)
        self._offered = Offered(card, Namespace(offer.namespace, offer.secret, offer.roster))
        self._become(_GuestStage.DECISION, now + DECISION_SECONDS)
        return [self._offered]

    def _on_admitted(self, encrypted: EncryptedMessage, _raw: bytes, _now: float) -> list[Effect]:
        admitted = self._decrypted(encrypted)
        if not isinstance(admitted, Admitted):
            raise MalformedFrame("The other side encrypted a message that is not an admission")
        peer, offered = self._offered.peer, self._offered.namespace
        namespace = Namespace(offered.name, offered.secret, admitted.roster)
        reason = f'This machine joined "{namespace.name}" through "{peer.name}".'
        self._become(_GuestStage.OVER, None)
        return [Paired(peer, namespace, reason), HangUp(reason)]

    def _on_refused(self, refused: PairingRefused, _raw: bytes, _now: float) -> list[Effect]:
        if refused.why is Refusal.VERSION and (build := refused.build) is not None:
            mine = self._me.card.name
            differs = VersionMismatch(mine, THIS_BUILD, "the other machine", build)
            return self._fail(None, str(differs))
        retry = refused.why is Refusal.BUSY and self._stage is _GuestStage.REPLY
        return self._fail(None, SENTENCES[refused.why], retry=retry)

    def _decide(self, now: float) -> list[Effect]:
        effects = self.tick(now)
        if not effects and self._stage is not _GuestStage.DECISION:
            raise UnsupportedOperation("There is no offer to answer")
        return effects

    def _encrypted(self, message: Secret) -> SendBytes:
        return SendBytes(encode(EncryptedMessage(self._outbox.encrypt(encode(message)))))

    def _decrypted(self, encrypted: EncryptedMessage) -> Secret:
        return decode_secret(self._inbox.decrypt(encrypted.box))

    def _fail(self, why: Refusal | None, reason: str, *, retry: bool = False) -> list[Effect]:
        self._become(_GuestStage.OVER, None)
        told = [SendBytes(encode(PairingRefused(why)))] if why else []
        return [*told, HangUp(reason), PairingEnded(reason, retry)]

    def _become(self, stage: _GuestStage, deadline: float | None) -> None:
        self._stage, self.deadline = stage, deadline

    # (what is due, what came) -> what happens.  Any other pair is a fault of the other side.
    _STEPS: ClassVar[Mapping[tuple[_GuestStage, type], Callable[..., list[Effect]]]] = {
        (_GuestStage.REPLY, Reply): _on_reply,
        (_GuestStage.CONFIRM, Confirm): _on_confirm,
        (_GuestStage.OFFER, EncryptedMessage): _on_offer,
        (_GuestStage.ADMITTED, EncryptedMessage): _on_admitted,
        **dict.fromkeys(((stage, PairingRefused) for stage in _GuestStage), _on_refused),
    }


# --------------------------------------------------------------------------------------------------
# What a machine does with the namespace it has when it is offered another.
#
# Every machine starts with a private namespace that it made silently on first use.  While no other
# machine is in it, it means nothing to its owner, and joining replaces it silently.  Leaving a
# group that has members, or one that was made on purpose, is a person's decision.


@dataclass(frozen=True, slots=True)
class Belonging:
    """What matters of a namespace for this decision."""

    name: str
    group_id: bytes
    """The group's id; it stays the same when the secret changes."""
    commitment: bytes
    """The hash that stands for the current secret."""
    others: int = 0
    """How many machines besides this one are in it."""
    unused: bool = False
    """Whether it was made silently and no other machine has joined it."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Store the offered namespace in place of the current one."""

    reason: str = ""
    """What the user should know about it besides."""


@dataclass(frozen=True, slots=True)
class AskUser:
    """Let the user choose; ``reason`` is the question."""

    reason: str


@dataclass(frozen=True, slots=True)
class AlreadyMember:
    """Nothing to store but the newer roster."""

    reason: str


Adoption: TypeAlias = Replace | AskUser | AlreadyMember


def decide_adoption(current: Belonging | None, offered: Belonging) -> Adoption:
    """Whether joining ``offered`` needs a question."""
    if current is None:
        return Replace()
    if current.group_id == offered.group_id:
        if current.commitment == offered.commitment:
            return AlreadyMember(f'This machine is already in "{offered.name}".')
        return Replace(f'"{offered.name}" has a new secret; this machine has it now.')
    if current.unused:
        return Replace()
    company = {0: "alone", 1: "with one other machine"}.get(
        current.others, f"with {current.others} other machines"
    )
    return AskUser(f'This machine is in "{current.name}" {company}. Join "{offered.name}" instead?')
