"""The peers of the last run, kept for the day on which multicast does not work.

::

    ~/.potluck/known/<tag of the namespace>     at most 64 peers, newest first, for 30 days

They are hints like all others: an address at which somebody once was, and who.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from potluck.decoding import decode_json
from potluck.errors import DistributedError
from potluck.net.addresses import Address, is_loopback
from potluck.net.discovery_records import Advert, Sighting
from potluck.net.private_files import (
    ensure_private_directory,
    exclusive_lock,
    read_private,
    replace_private,
)
from potluck.vocabulary import NodeId

__all__ = ["MAX_KNOWN", "KnownPeers"]

MAX_KNOWN = 64
MAX_SIZE = 64 << 10  # bytes of the file; 64 peers take about 20 KiB
MAX_FILES = 16
"""Namespaces that are remembered; those used longest ago are forgotten."""

KEPT = 30 * 24 * 3600.0  # seconds
_PATIENCE = 2.0  # seconds to wait for another process that writes

_Text = Annotated[str, msgspec.Meta(max_length=255)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer."""

    node: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z]{32}$")]
    job_tag: _Text
    name: _Text
    addresses: Annotated[list[tuple[_Text, _Port]], msgspec.Meta(min_length=1, max_length=8)]
    when: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds since 1970 when it was last reached."""


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
                    _sighting(each)
                    for each in kept
                    if not is_current or advert.job_tag in {"", each.job_tag}
                ]
        return []

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
            )
            for peer in peers
            # Processes of this machine need no memory to find each other.
            if peer.node and peer.node != advert.node and (addresses := _elsewhere(peer.addresses))
        ][:MAX_KNOWN]
        if not fresh:
            return
        ensure_private_directory(self._directory)
        with exclusive_lock(self._directory / ".lock", patience=_PATIENCE):
            places = {_place(each) for each in fresh}
            kept = [each for each in self._read(advert.tag) if _place(each) not in places]
            content = msgspec.json.encode((fresh + kept)[:MAX_KNOWN])
            replace_private(self._directory / advert.tag, content)
            self._forget_oldest()

    def _read(self, tag: str) -> list[_Known]:
        """What is kept under a tag; damaged, foreign and outdated entries are as good as none."""
        try:
            text = read_private(self._directory / tag, limit=MAX_SIZE + 1) or b"[]"
            kept = decode_json(text, _Kept) if len(text) <= MAX_SIZE else []
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


def _place(known: _Known) -> tuple[str, str, int]:
    """What makes two entries the same: a machine's processes differ by their ports."""
    return known.node, known.job_tag, known.addresses[0][1]


def _sighting(known: _Known) -> Sighting:
    addresses = tuple(Address(host, port) for host, port in known.addresses)
    return Sighting(
        key=f"{known.node}@{addresses[0]}",
        sources=("known",),
        node=NodeId(known.node),
        incarnation=0,
        job_tag=known.job_tag,
        addresses=addresses,
        version=0,
        name=known.name,
    )
