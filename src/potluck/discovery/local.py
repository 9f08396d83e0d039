"""Processes of the same user on the same machine: each leaves a note where the others look.

::

    ~/.potluck/neighbours/1731700000000.json     where it listens, and for which namespace and job
                         /1731700000000.lock     held by its writer for as long as it lives

A note is found within milliseconds and needs no network.  A note whose lock is free was left by a
process that has died; the first process that notices removes it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from potluck._decode import decode_json
from potluck._types import NodeId, ProcessId
from potluck._version import Build
from potluck.discovery.mdns import LOOPBACK
from potluck.discovery.records import Advert, Sighting
from potluck.errors import DistributedError
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.node import boot_tag
from potluck.identity.private_files import (
    HeldLock,
    ensure_private_directory,
    exclusive_lock,
    maybe_lock,
    read_private,
    replace_private,
)
from potluck.net.addresses import Address, is_loopback

MAX_NOTES = 1024
"""As many as there can be processes of one user on one machine."""

MAX_SIZE = 4096  # bytes of a note; ours have about 300

_Text = Annotated[str, msgspec.Meta(max_length=64)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Note(msgspec.Struct, frozen=True):
    """What a process writes about itself."""

    place: Annotated[str, msgspec.Meta(max_length=128)]
    """Which boot of which machine and which of its networks: elsewhere, loopback is another."""
    tag: _Text
    job_tag: _Text
    node: _Text
    incarnation: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    version: _Number
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    hosts: Annotated[list[_Text], msgspec.Meta(max_length=16)]
    oldest: _Number = 0
    potluck: _Text = ""


class LocalProcesses:
    """Our own note, and those of the others; used by one thread."""

    def __init__(self, home: Path) -> None:
        self._directory = ensure_private_directory(home / "neighbours")
        self._place = _place()
        self._lock: HeldLock | None = None
        self._note: Path | None = None
        self._read: dict[str, tuple[tuple[int, int], _Note | None]] = {}

    def publish(self, advert: Advert) -> None:
        """Leave a note, or change it."""
        if not advert.port:
            return
        name = self._directory / str(advert.incarnation)
        if self._lock is None:
            self._sweep()
            self._lock = maybe_lock(name.with_suffix(".lock"))
        self._note = name.with_suffix(".json")
        note = _Note(
            place=self._place,
            tag=advert.tag,
            job_tag=advert.job_tag,
            node=advert.node,
            incarnation=advert.incarnation,
            version=advert.version,
            port=advert.port,
            hosts=list(advert.hosts)[:16] or [LOOPBACK],
            oldest=advert.oldest,
            potluck=advert.potluck[:64],
        )
        replace_private(self._note, msgspec.json.encode(note))

    def look(self, advert: Advert) -> list[Sighting]:
        """Who else is alive on this machine and works on the same job of the same namespace."""
        notes = [self._maybe_read(entry) for entry in self._entries()]
        return [
            _sighting(note)
            for note in notes
            if note is not None
            and (note.place, note.tag) == (self._place, advert.tag)
            and advert.job_tag in {"", note.job_tag}
            and (note.node, note.incarnation) != advert.process
            and self._is_alive(note)
        ]

    def has_note(self, process: ProcessId) -> bool:
        """Whether the note of a process is there, whatever job or network it is of."""
        return (self._directory / f"{process.incarnation}.json").exists()

    def close(self) -> None:
        """Take our note back."""
        note, self._note = self._note, None
        lock, self._lock = self._lock, None
        if note is not None and lock is not None:
            _remove(note, lock)

    def _sweep(self) -> None:
        """Remove what dead processes of any job have left: no other process may look again."""
        for entry in self._entries():
            note = self._maybe_read(entry)
            if note is not None:
                self._is_alive(note)

    def _entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self._directory) as found:
            entries = [entry for entry in found if entry.name.endswith(".json")][:MAX_NOTES]
        names = {entry.name for entry in entries}
        self._read = {name: read for name, read in self._read.items() if name in names}
        return entries

    def _maybe_read(self, entry: os.DirEntry[str]) -> _Note | None:
        """A note, from memory if it has not changed; None if it is not one of ours."""
        try:
            status = entry.stat()
            stamp = status.st_ino, status.st_mtime_ns
            known = self._read.get(entry.name)
            if known is None or known[0] != stamp:
                text = read_private(Path(entry.path), limit=MAX_SIZE + 1) or b""
                known = self._read[entry.name] = stamp, _parse(text, entry.name)
            return known[1]
        except (OSError, DistributedError):  # gone in the meantime, or not private
            return None

    def _is_alive(self, note: _Note) -> bool:
        """Whether its writer still holds the lock; what a dead one left is removed."""
        name = self._directory / str(note.incarnation)
        try:
            lock = maybe_lock(name.with_suffix(".lock"))
        except DistributedError:
            return False
        if lock is None:
            return True
        _remove(name.with_suffix(".json"), lock)
        return False


def _remove(note: Path, lock: HeldLock) -> None:
    """The note first, so that no process sees it without its lock; Windows keeps open files."""
    with contextlib.suppress(OSError):
        note.unlink(missing_ok=True)
    lock.release()
    with contextlib.suppress(OSError):
        note.with_suffix(".lock").unlink(missing_ok=True)


def _parse(text: bytes, name: str) -> _Note | None:
    if len(text) > MAX_SIZE:
        return None
    try:
        note = decode_json(text, _Note)
    except (msgspec.DecodeError, UnicodeDecodeError):  # the latter from bytes that are no text
        return None
    return note if name == f"{note.incarnation}.json" else None


def _sighting(note: _Note) -> Sighting:
    return Sighting(
        key=f"{note.node}/{note.incarnation}",
        sources=("neighbour",),
        node=NodeId(note.node),
        incarnation=note.incarnation,
        job_tag=note.job_tag,
        addresses=tuple(Address(host, note.port) for host in note.hosts),
        version=note.version,
        oldest=note.oldest,
        potluck=note.potluck,
    )


def _place() -> str:
    """Where loopback is the same: this boot of this machine, and this network namespace."""
    network = 0
    with contextlib.suppress(OSError):
        network = Path("/proc/self/ns/net").stat().st_ino
    return (
        f"{boot_tag(NodeId('neighbours'))}/{network}"  # stays on this machine: anybody's tag does
    )


# --------------------------------------------------------------------------------------------------
# The peers of the last run, kept for the day on which multicast does not work.
#
# ::
#
#     ~/.potluck/known/<tag of the namespace>     at most 64 peers, newest first, for 30 days
#
# They are hints like all others: an address at which somebody once was, and who.

MAX_KNOWN = 64
KNOWN_PEERS_MAX_SIZE = 64 << 10  # bytes of the file; 64 peers take about 20 KiB
MAX_FILES = 16
"""Namespaces that are remembered; those used longest ago are forgotten."""

KEPT = 30 * 24 * 3600.0  # seconds
_PATIENCE = 2.0  # seconds to wait for another process that writes

_KnownPeersText = Annotated[str, msgspec.Meta(max_length=255)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Known(msgspec.Struct, frozen=True, omit_defaults=True):
    """One peer."""

    node: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z]{32}$")]
    job_tag: _KnownPeersText
    name: _KnownPeersText
    addresses: Annotated[
        list[tuple[_KnownPeersText, _Port]], msgspec.Meta(min_length=1, max_length=8)
    ]
    when: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds since 1970 when it was last reached."""
    version: _Number = 0
    oldest: _Number = 0
    potluck: _Text = ""
    """What it ran then."""


_Kept = Annotated[list[_Known], msgspec.Meta(max_length=MAX_KNOWN)]


class KnownPeers:
    """What this machine remembers of one namespace."""

    def __init__(self, home: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._directory = home / "known"
        self._clock = clock

    def recall(self, advert: Advert) -> list[Sighting]:
        """The peers of this namespace and job; none where nothing is, or nothing can be read.

        After a change of the secret, those known under an earlier one.
        """
        for tag in (advert.tag, *advert.old_tags):
            kept = self._read(tag)
            if kept:
                is_current = tag == advert.tag  # tags of jobs follow the secret
                return [
                    _known_peers_sighting(each)
                    for each in kept
                    if not is_current or advert.job_tag in {"", each.job_tag}
                ]
        return []

    def builds(self, namespace: NetworkNamespace) -> dict[NodeId, Build]:
        """What the machines of a namespace ran when they were last met."""
        found: dict[NodeId, Build] = {}
        for tag in (namespace.discovery_tag, *namespace.old_tags):
            for each in self._read(tag):
                build = Build.announced(each.potluck, each.version, each.oldest)
                if build is not None:
                    found.setdefault(NodeId(each.node), build)
        return found

    def remember(self, advert: Advert, peers: Iterable[Sighting]) -> None:
        """Keep these as the newest; raises a :class:`DistributedError` where that fails."""
        now = self._clock()
        fresh = [
            _Known(
                node=peer.node,
                job_tag=advert.job_tag,
                name=peer.name[:255],
                addresses=[(address.host, address.port) for address in addresses[:8]],
                when=now,
                version=peer.version,
                oldest=peer.oldest,
                potluck=peer.potluck[:64],
            )
            for peer in peers
            # Processes of this machine need no memory to find each other.
            if peer.node and peer.node != advert.node and (addresses := _elsewhere(peer.addresses))
        ][:MAX_KNOWN]
        if not fresh:
            return
        ensure_private_directory(self._directory)
        with exclusive_lock(self._directory / ".lock", patience=_PATIENCE):
            places = {_known_peers_place(each) for each in fresh}
            kept = [
                each for each in self._read(advert.tag) if _known_peers_place(each) not in places
            ]
            content = msgspec.json.encode((fresh + kept)[:MAX_KNOWN])
            replace_private(self._directory / advert.tag, content)
            self._forget_oldest()

    def _read(self, tag: str) -> list[_Known]:
        """What is kept under a tag; damaged, foreign and outdated entries are as good as none."""
        try:
            text = read_private(self._directory / tag, limit=KNOWN_PEERS_MAX_SIZE + 1) or b"[]"
            kept = decode_json(text, _Kept) if len(text) <= KNOWN_PEERS_MAX_SIZE else []
        except (DistributedError, msgspec.DecodeError, UnicodeDecodeError):
            return []
        oldest = self._clock() - KEPT
        return [each for each in kept if each.when >= oldest]

    def _forget_oldest(self) -> None:
        with contextlib.suppress(OSError):
            files = [path for path in self._directory.iterdir() if not path.name.startswith(".")]
            files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
            for path in files[MAX_FILES:]:
                path.unlink(missing_ok=True)


def _elsewhere(addresses: Iterable[Address]) -> list[Address]:
    """Those that may be another machine's."""
    return [address for address in addresses if not is_loopback(address.host)]


def _known_peers_place(known: _Known) -> tuple[str, str, int]:
    """What makes two entries the same: a machine's processes differ by their ports."""
    return known.node, known.job_tag, known.addresses[0][1]


def _known_peers_sighting(known: _Known) -> Sighting:
    addresses = tuple(Address(host, port) for host, port in known.addresses)
    return Sighting(
        key=f"{known.node}@{addresses[0]}",
        sources=("known",),
        node=NodeId(known.node),
        incarnation=0,
        job_tag=known.job_tag,
        addresses=addresses,
        version=known.version,
        name=known.name,
        oldest=known.oldest,
        potluck=known.potluck,
    )
