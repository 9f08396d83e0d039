"""Which start of which process on which machine.

All processes of a user on one machine share the node's key, so a process is (node id, incarnation).
Incarnations only ever grow: whatever starts later on this machine has a higher one, also after a
crash.  Each process also holds a *slot*, a file lock that the operating system lets go the moment
the process ends; so a later incarnation **in the same slot** proves that the earlier one is dead,
while one in another slot is merely a neighbour.

The machine tag tells machines apart.  A node id that shows up with two machine tags, or with two
boot tags while both are alive, is a key that was copied.
"""

from __future__ import annotations

import hmac
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from potluck.errors import BackendUnavailable
from potluck.forking import ForkSafeLock
from potluck.net.private_files import (
    KEY_SIZE,
    HeldLock,
    create_private,
    ensure_private_directory,
    exclusive_lock,
    maybe_lock,
    potluck_home,
    read_key,
    read_private,
    replace_private,
)
from potluck.vocabulary import NodeId

__all__ = [
    "Incarnation",
    "ThisProcess",
    "boot_tag",
    "claim_incarnation",
    "claim_process",
    "is_slot_free",
    "machine_tag",
    "this_process",
]

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
    """A number higher than every one given out in ``home`` before, and a slot nobody else holds.

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
        f"{MAX_SLOTS} Potluck processes of this user already run on this machine",
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
    if sys.platform == "darwin":
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
    if sys.platform == "darwin":
        listing = _output_of("/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice")
        lines = [line for line in listing.splitlines() if b"IOPlatformUUID" in line]
        return [line.split(b'"')[-2] for line in lines[:1]]
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"SOFTWARE\Microsoft\Cryptography") as key:
            return [str(winreg.QueryValueEx(key, "MachineGuid")[0]).encode()]
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
