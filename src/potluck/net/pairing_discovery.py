"""How the two machines of a pairing find each other: a line in the local network's own directory.

A machine that shows a code announces its number (the 7 of ``7-guitar-harbor``), the version of the
pairing protocol and a port, by multicast DNS under a service type of pairing's own.  Neither the
words nor a name nor an id is in it.  Everybody may answer for any number; a false answer leads to
a stranger who does not know the code, and whoever searches decides how many strangers to try.

zeroconf brings its own threads and event loop; they begin and end with :class:`PairingDiscovery`.
"""

from __future__ import annotations

import queue
import re
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from potluck.closing import Closing
from potluck.net.addresses import Address, usable_hosts
from potluck.net.mdns import (
    LOOPBACK,
    DiscoveryUnavailable,
    open_zeroconf,
    scoped,
    unavailable,
    unscoped,
)

if TYPE_CHECKING:  # takes a quarter of a second: imported when used
    from zeroconf import ServiceBrowser

__all__ = ["SERVICE", "DiscoveryUnavailable", "Found", "PairingDiscovery"]

SERVICE = "_potluck-pair._tcp.local."
MAX_ANSWERS = 64
"""Different answers that are looked at; a flood of them must cost no more than that."""

MAX_HOSTS = 6
"""Addresses of one answer that are tried: more would let it point us at a whole network."""

_RESOLVE = 1.5  # seconds to learn address and port of somebody who has just answered
_HINT = "Give the address of the other machine: potluck pair CODE --host ADDRESS"
_LABEL = re.compile(r"(?P<slot>[0-9]{1,2})-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Found:
    """Somebody who says that he shows the code with this number."""

    slot: int
    addresses: tuple[Address, ...]


class PairingDiscovery(Closing):
    """This machine's ear and voice in the local network, until closed; a context manager.

    Raises :class:`DiscoveryUnavailable` where there is no multicast.
    """

    def __init__(self) -> None:
        self._zeroconf = open_zeroconf(usable_hosts() or [LOOPBACK], hint=_HINT)
        self._browser: ServiceBrowser | None = None
        self._answers = _Answers()

    def announce(self, slot: int, port: int, version: int) -> None:
        """Tell the network, until closed, that the code with this number is shown here."""
        from zeroconf import Error, ServiceInfo

        token = secrets.token_hex(6)
        info = ServiceInfo(
            SERVICE,
            f"{slot}-{token}.{SERVICE}",
            port=port,
            properties={"slot": str(slot), "v": str(version)},
            server=f"potluck-{token}.local.",  # not this machine's own name
            parsed_addresses=[unscoped(host) for host in usable_hosts() or [LOOPBACK]],
        )
        try:
            # The name is random, so there is nobody to ask whether it is taken.
            self._zeroconf.register_service(info, cooperating_responders=True)
        except (Error, OSError) as error:
            raise unavailable(error, _HINT) from error

    def slots(self, seconds: float) -> set[int]:
        """The numbers that other machines show, as far as they answer within this time."""
        self._browse()
        deadline = time.monotonic() + seconds
        found = set()
        while (label := self._answers.next_label(deadline)) is not None:
            found.add(int(label[1]["slot"]))
        return found

    def find(self, slot: int, seconds: float) -> Found | None:
        """The next machine that answers for this number, each once; None if none does in time."""
        self._browse()
        deadline = time.monotonic() + seconds
        while (label := self._answers.next_label(deadline)) is not None:
            name, parts = label
            if int(parts["slot"]) == slot and (found := self._resolve(name, slot)) is not None:
                return found
            if time.monotonic() >= deadline:  # a flood of answers leading nowhere ends too
                break
        return None

    def close(self) -> None:
        """Take back what was announced, and end every thread."""
        if self._browser is not None:
            self._browser.cancel()
            self._browser = None
        self._zeroconf.close()

    def _browse(self) -> None:
        if self._browser is None:
            from zeroconf import ServiceBrowser

            self._browser = ServiceBrowser(self._zeroconf, SERVICE, [self._answers])

    def _resolve(self, name: str, slot: int) -> Found | None:
        from zeroconf import ServiceInfo

        info = ServiceInfo(SERVICE, name)
        if not info.request(self._zeroconf, _RESOLVE * 1000) or not info.port:
            return None
        if info.properties.get(b"slot") != str(slot).encode():
            return None
        hosts = [scoped(host) for host in info.parsed_scoped_addresses()][:MAX_HOSTS]
        return Found(slot, tuple(Address(host, info.port) for host in hosts))


class _Answers:
    """Collects the names that answer, on zeroconf's thread, for whoever searches."""

    def __init__(self) -> None:
        self._names: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._seen: set[str] = set()

    def __call__(self, *, name: str, **_details: Any) -> None:
        """Somebody answered, or changed or took back an answer; dialling will tell which."""
        if name not in self._seen and len(self._seen) < MAX_ANSWERS:
            self._seen.add(name)
            self._names.put(name)

    def next_label(self, deadline: float) -> tuple[str, re.Match[str]] | None:
        """The next name of ours that answered; None when the time is over."""
        while True:
            try:
                name = self._names.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if label := _LABEL.fullmatch(name.removesuffix(f".{SERVICE}")):
                return name, label
