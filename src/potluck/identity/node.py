"""Who a node is: an Ed25519 key that never leaves its machine.

The node's id is a hash of the public key, so proving the key proves the id, and no register
of names is needed.  The key lies in ``~/.potluck/node_keypair`` as a raw 32-byte seed, mode 0600,
and is made on first use; processes that start at the same moment all end up with the same one.
What tells these processes apart is their incarnation, see :mod:`potluck.identity.node`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)

from potluck import _platform
from potluck._process import ForkSafeLock
from potluck._types import NodeId
from potluck.errors import BackendUnavailable, IoError
from potluck.identity.private_files import (
    KEY_SIZE,
    HeldLock,
    check_home,
    create_private,
    ensure_private_directory,
    exclusive_lock,
    maybe_lock,
    potluck_home,
    read_key,
    read_private,
    replace_private,
)

# --------------------------------------------------------------------------------------------------
# Lists of words: to name nodes, and to recognise passphrases that are easily guessed.

# 128 each, short and easily told apart when read out; any change renames nodes.
_ADJECTIVES = """
able agile amber ample apt azure basic bold brave breezy brief bright brisk broad bronze busy calm
candid careful cheery chief civil clear clever cosmic cosy crimson crisp curious dapper daring
dear deep deft eager early earnest easy equal fair fancy fast fearless fine firm fluent fond frank
free fresh friendly frosty gentle glad golden good grand green handy happy hardy hearty honest
humble ideal jolly jovial keen kind lively logical loyal lucid lucky lunar mellow merry mighty
mild modest neat nice nimble noble novel olive open patient plucky polite prime proud punctual
quick quiet rapid ready regal robust rosy royal rustic scarlet serene sharp shiny silent silver
simple sincere sleek smart snug solar solid speedy stable steady sunny swift tidy trusty upbeat
vivid warm wise witty zesty
"""
_ANIMALS = """
adder alpaca ant antelope badger bat bear beaver bee beetle bison boar bobcat buffalo bunny camel
canary caribou carp cat cheetah chipmunk cicada cobra condor cougar cow crab crane cricket crow
deer dingo dolphin donkey dove dragonfly duck eagle eel egret elephant elk emu falcon ferret finch
firefly flamingo fox frog gazelle gecko gibbon giraffe goat goose gopher grouse gull hamster hare
hawk hedgehog heron hornet horse hyena ibex ibis iguana impala jackal jaguar jay kangaroo kestrel
kiwi koala ladybug lark lemur leopard lion lizard llama lobster lynx magpie mantis marmot marten
mink mole moose mouse mule newt ocelot octopus orca ostrich otter owl panda panther parrot peacock
pelican penguin pigeon pony puffin puma quail rabbit raccoon raven robin salmon seal sparrow swan
tiger toad turtle walrus zebra
"""

# What every sentence is full of.
_LITTLE_WORDS = """
a an and are as at be but by can do for from had has have he her him his how i if in is it its me
my no not of on or our she so that the their them they this to too us was we were what when who
why will with you your der die das und ist ein eine le la les de et un une el los y
am auf aus bei bin bis da dass dein den dem des dich dir doch du er es für hat ich ihr im mein mich
mir mit nach nicht nur sein sich sie sind so uns unser von vom war was wer werde wie wir zu zum zur
au aux ce dans des du elle en est il ils je ma mes moi mon ne nous on ou où par pas pour qu que qui
sa se ses son sur ta te toi ton tu vous al con cuyo del ella ellos en es la las lo mi mis muy ni que
quiero se sin su sus te tus una yo che chi ci col da dal dei del della di era gli ho il io la ma mi
ne nel nella noi non nostra nostro per più quel si sono tra vi ao as com do dos em eu já mas na nas
nos não o os para sem seu sua um uma ad amet cum dolor ergo et ex id ipsum lorem nec non pro quam
qui quod sed sit sum tu ut vel
"""

# What passwords are made of, and what somebody who guesses a namespace would try first.

# The pairs of letters that make up most of a text, in English and its neighbours.

KNOWN_DIGITS = (
    "3141592653589793238462643383279502884197169399375105820974944592307816406286208998628034825342",
    "2718281828459045235360287471352662497757247093699959574966967627724076630353547594571382178525",
    "1414213562373095048801688724209698078569671875376948073176679737990732478462107038850387534327",
)
"""Pi, e and the square root of two, without the point."""

ADJECTIVES = tuple(_ADJECTIVES.split())
ANIMALS = tuple(_ANIMALS.split())
LITTLE_WORDS = frozenset(_LITTLE_WORDS.split())


# --------------------------------------------------------------------------------------------------
# What machines are called: by the names people gave them, or else one made from the id.
#
# The made name, such as ``calm-otter``, never changes and needs no agreement; but it has only 14
# bits, two nodes may share one, and anybody can search for a key with a wanted name.  So names are
# shown, and ids decide.

MAX_NAME = 64
"""Characters of a machine's name, as many as a label of a host name has."""


def machine_name() -> str:
    """What this machine is called everywhere: ``POTLUCK_NAME``, or its host name.

    Without the domain, which differs with the network a laptop is in.
    """
    named = os.environ.get("POTLUCK_NAME", "")
    return (named or socket.gethostname().partition(".")[0])[:MAX_NAME]


def short_name(node: NodeId) -> str:
    """The readable name that belongs to this id, the same on every machine."""
    digest = hashlib.sha256(b"potluck short name v1\0" + node.encode()).digest()
    return f"{ADJECTIVES[digest[0] % len(ADJECTIVES)]}-{ANIMALS[digest[1] % len(ANIMALS)]}"


# --------------------------------------------------------------------------------------------------

KEY_FILE = "node_keypair"
NODE_ID_SIZE = 32  # characters of base32: 160 bits, out of reach for a second key with the same id

_ADVICE = (
    "Restore it from a backup, or delete it: this machine then gets a new identity "
    "and has to be paired again."
)


def node_id(public_key: bytes) -> NodeId:
    """The id that belongs to a raw Ed25519 public key."""
    digest = hashlib.sha256(b"potluck node id v1\0" + public_key).digest()
    return NodeId(base64.b32encode(digest[:20]).decode().lower())


class NodeIdentity:
    """The key of this node and everything that follows from it.

    >>> me, other = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    >>> signature = me.sign(b"I bring the soup")
    >>> NodeIdentity.verify(me.public_key, signature, b"I bring the soup")
    True
    >>> NodeIdentity.verify(other.public_key, signature, b"I bring the soup")
    False
    """

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_SIZE:
            msg = f"An Ed25519 seed has {KEY_SIZE} bytes, not {len(seed)}"
            raise ValueError(msg)
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        self.id: NodeId = node_id(self.public_key)

    @classmethod
    def load_or_generate(cls, path: str | os.PathLike[str] | None = None) -> NodeIdentity:
        """The identity kept in ``path`` (default ``~/.potluck/node_keypair``), made if missing.

        Raises :class:`UnsafeFile` if others may read it and :class:`DamagedFile` if it is not a
        key; both say what to do.
        """
        file = Path(path).expanduser() if path is not None else potluck_home() / KEY_FILE
        ensure_private_directory(file.parent)
        check_home(file.parent)
        seed = read_key(file, advice=_ADVICE)
        if seed is None:
            # Whoever comes second discards its own and reads what the first has made.
            create_private(file, secrets.token_bytes(KEY_SIZE))
            seed = read_key(file, advice=_ADVICE)
        if seed is None:
            raise IoError(f"{file} vanished while it was being read", hint="Start it again.")
        return cls(seed)

    @classmethod
    def ephemeral(cls) -> NodeIdentity:
        """A new identity that is kept nowhere, for tests and short-lived observers."""
        return cls(secrets.token_bytes(KEY_SIZE))

    @property
    def short_name(self) -> str:
        """A name for people, such as ``calm-otter``; two nodes may share one."""
        return short_name(self.id)

    def sign(self, message: bytes, *, purpose: str = "message") -> bytes:
        """64 bytes that only this node can make; valid for this ``purpose`` alone."""
        return self._key.sign(_framed(message, purpose))

    @staticmethod
    def verify(
        public_key: bytes, signature: bytes, message: bytes, *, purpose: str = "message"
    ) -> bool:
        """Whether the owner of ``public_key`` signed the message for this purpose.

        Everything may come from a stranger; what is not even a key or a signature is False.
        """
        try:
            key = Ed25519PublicKey.from_public_bytes(public_key)
            key.verify(signature, _framed(message, purpose))
        except (InvalidSignature, ValueError):
            return False
        return True

    def private_key_pem(self, password: bytes) -> bytes:
        """The private key encrypted with ``password``, the form in which ``ssl`` can load it."""
        return self._key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password)
        )

    def __eq__(self, other: object) -> bool:
        """Whether both are the same key."""
        if not isinstance(other, NodeIdentity):
            return NotImplemented
        return self.public_key == other.public_key

    def __hash__(self) -> int:
        return hash(self.public_key)

    def __repr__(self) -> str:
        """Name and id; the key is never shown."""
        return f"NodeIdentity({self.short_name}, {self.id})"


def _framed(message: bytes, purpose: str) -> bytes:
    """What is really signed.

    The same key also signs TLS handshakes (64 spaces, then text), so our signatures begin with
    words of our own; and a signature for one purpose must never pass for another.
    """
    label = purpose.encode()
    return b"potluck signature v1\0" + len(label).to_bytes(2, "big") + label + message


# --------------------------------------------------------------------------------------------------
# Which start of which process on which machine.
#
# All processes of a user on one machine share the node's key, so a process is (node id,
# incarnation). Incarnations only ever grow: whatever starts later on this machine has a higher one,
# also after a crash.  Each process also holds a *slot*, a file lock that the operating system lets
# go the moment the process ends; so a later incarnation **in the same slot** proves that the
# earlier one is dead, while one in another slot is merely a neighbour.
#
# The machine tag tells machines apart.  A node id that shows up with two machine tags, or with two
# boot tags while both are alive, is a key that was copied.

MAX_SLOTS = 1024  # processes of one user on one machine; each keeps one descriptor and one file
_DIGITS = 20  # a 64-bit number
_TAG_SIZE = 32  # hexadecimal digits: 128 bits

_known: dict[tuple[int, Path, NodeId], ThisProcess] = {}
_asking = ForkSafeLock()
_claims: list[Incarnation] = []  # a claim lasts as long as the process, even if nobody keeps it


class Incarnation:
    """This process's claim: ``number`` grows with every start, ``slot`` is ours while we live."""

    def __init__(self, number: int, slot: int, lock: HeldLock) -> None:
        self.number = number
        self.slot = slot
        self._lock = lock
        _claims.append(self)

    def release(self) -> None:
        """Free the slot before the process ends; call it when this node has left for good."""
        self._lock.release()
        if self in _claims:
            _claims.remove(self)

    def __repr__(self) -> str:
        """Number and slot."""
        return f"Incarnation({self.number}, slot={self.slot})"


def claim_incarnation(
    home: Path | None = None, *, clock: Callable[[], float] = time.time
) -> Incarnation:
    """A number higher than all given out in ``home`` before, and a slot of this process alone.

    The number is the time in milliseconds, or one more than the last if the clock is behind: the
    counter file keeps it growing when the clock is wrong, and the clock keeps it growing when the
    file was lost or came back from a backup.
    """
    home = ensure_private_directory(home or potluck_home())
    slots = ensure_private_directory(home / "processes")
    with exclusive_lock(home / "lock"):
        slot, lock = _free_slot(slots)
        try:
            number = max(_last(home / "incarnation") + 1, int(clock() * 1000))
            replace_private(home / "incarnation", str(number).encode())
        except BaseException:
            lock.release()
            raise
    return Incarnation(number, slot, lock)


class ThisProcess(NamedTuple):
    """What this process says about itself in a hello."""

    machine: str
    boot: str
    slot: int
    incarnation: int


def this_process(node: NodeId, home: Path | None = None) -> ThisProcess:
    """Which start of which process this is; claimed once for each home, and for each fork."""
    home = home or potluck_home()
    key = os.getpid(), home, node
    with _asking:
        if key not in _known:
            _known[key], _ = claim_process(node, home)
        return _known[key]


def claim_process(node: NodeId, home: Path | None = None) -> tuple[ThisProcess, Incarnation]:
    """The same anew, for one who may come and go several times; the claim is theirs to release."""
    claim = claim_incarnation(home)
    tags = machine_tag(node, home), boot_tag(node)
    return ThisProcess(*tags, claim.slot, claim.number), claim


def is_slot_free(slot: int, home: Path | None = None) -> bool:
    """Whether no process of this user on this machine holds a slot: the one that did has ended.

    Forked children of a process keep its slot until they close it or end, so this never says so
    too early.
    """
    home = home or potluck_home()
    path = home / "processes" / f"{slot}.lock"
    if not 0 <= slot < MAX_SLOTS or not path.exists():
        return False
    with exclusive_lock(home / "lock"):  # a process that starts now must not find it taken
        lock = maybe_lock(path)
        if lock is None:
            return False
        lock.release()
    return True


def _free_slot(slots: Path) -> tuple[int, HeldLock]:
    for slot in range(MAX_SLOTS):
        lock = maybe_lock(slots / f"{slot}.lock")
        if lock is not None:
            return slot, lock
    raise BackendUnavailable(
        f"{MAX_SLOTS} Potluck processes of this user are already running on this machine",
        hint="End some of them, or give others their own POTLUCK_HOME.",
    )


def _last(file: Path) -> int:
    """The number given out last; 0 if unknown, since then the clock takes over."""
    text = read_private(file, limit=_DIGITS + 1) or b""
    return int(text) if text.isdigit() and len(text) <= _DIGITS else 0


def machine_tag(node: NodeId, home: Path | None = None, *, root: Path = Path("/")) -> str:
    """What this machine shows in its hello, the same across restarts and reboots.

    Made from the operating system's machine id, and where a board has one its serial number, since
    memory cards get cloned.  Hashed with the node id, so it reveals neither.  Where there is no
    machine id (some containers) a random number beside the key takes its place.
    """
    facts = _machine_facts(root)
    if not facts:
        home = ensure_private_directory(home or potluck_home())
        facts = [_random_machine_id(home / "machine")]
    return _tag(b"\0".join(facts), b"machine", node)


def boot_tag(node: NodeId, *, root: Path = Path("/")) -> str:
    """What this machine shows until its next reboot; "" where that cannot be known.

    A disk cloned with everything on it has the same machine tag, but two machines that run at the
    same time never have the same boot tag.
    """
    if _platform.IS_MACOS:
        fact = _output_of("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid")
    else:
        fact = _content_of(root / "proc/sys/kernel/random/boot_id")
    return _tag(fact, b"boot", node) if fact else ""


def _tag(key: bytes, kind: bytes, node: NodeId) -> str:
    message = b"potluck " + kind + b" tag v1\0" + node.encode()
    return hmac.new(key, message, "sha256").hexdigest()[:_TAG_SIZE]


def _random_machine_id(file: Path) -> bytes:
    advice = "Delete it: a new one is made."
    known = read_key(file, advice=advice)
    if known is None:
        create_private(file, secrets.token_bytes(KEY_SIZE))
        known = read_key(file, advice=advice)
    return known or b""


def _machine_facts(root: Path) -> list[bytes]:
    """What the system says about itself; empty if it does not know who it is."""
    if _platform.IS_MACOS:
        listing = _output_of("/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice")
        lines = [line for line in listing.splitlines() if b"IOPlatformUUID" in line]
        return [line.split(b'"')[-2] for line in lines[:1]]
    if _platform.IS_WINDOWS:
        return [_platform.windows_machine_id().encode()]
    known = [_content_of(root / name) for name in ("etc/machine-id", "var/lib/dbus/machine-id")]
    # "uninitialized" is what an image holds until its first boot, so it is everybody's.
    machine = [fact for fact in known if fact and fact != b"uninitialized"][:1]
    serial = _content_of(root / "sys/firmware/devicetree/base/serial-number")
    return machine + ([serial] if serial else [])


def _content_of(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(256).strip(b" \t\r\n\0")
    except OSError:
        return b""


def _output_of(*command: str) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, timeout=5, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return b""
