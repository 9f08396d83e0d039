"""Where a process can be found: its machine, its addresses, and ports on which it may listen."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
from pathlib import Path
from typing import Annotated

import msgspec

from potluck.decoding import decode_json
from potluck.errors import MalformedFrame
from potluck.net import tcp
from potluck.net.addresses import Address, usable_hosts

__all__ = ["Whereabouts", "free_ports"]

LONGEST = 8192
"""Bytes of the description of one process; whatever is longer is none."""

_Text = Annotated[str, msgspec.Meta(max_length=255)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Whereabouts(msgspec.Struct, frozen=True):
    """What a process tells others about where it is."""

    machine: _Text
    """The same for processes that reach each other over loopback, and only for those."""
    hosts: Annotated[list[_Text], msgspec.Meta(max_length=16)]
    ports: Annotated[list[_Port], msgspec.Meta(max_length=16)]

    @classmethod
    def here(cls, ports: int = 0) -> Whereabouts:
        """Of this process, with so many ports that are free just now."""
        return cls(_machine(), usable_hosts()[:16], free_ports(ports))

    def to_bytes(self) -> bytes:
        """As others read it."""
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes, sender: str) -> Whereabouts:
        """As another process wrote it; raises ``MalformedFrame`` if it is anything else."""
        try:
            if len(data) <= LONGEST:
                return decode_json(data, cls)
            reason = f"{len(data)} bytes are too many"
        except (msgspec.DecodeError, ValueError) as error:  # the latter where it is no text
            reason = str(error)
        raise MalformedFrame(f"What is said of {sender} does not say where it is", cause=reason)

    def addresses(self, *, is_local: bool, also: str | None = None) -> list[str]:
        """Where it may listen: on this machine, or as seen from others.

        ``also`` is a host at which a user has said that it is; it comes first.
        """
        hosts = ["127.0.0.1"] if is_local else [host for host in self.hosts if _is_literal(host)]
        if also is not None and not is_local:
            hosts = [also, *hosts]
        return [str(Address(host, port)) for port in self.ports for host in hosts or ["127.0.0.1"]]


def _is_literal(host: str) -> bool:
    """Whether it is an address in numbers: names that others hand out are looked up by nobody."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens just now, all different."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(tcp.listen("", 0)) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]


def _machine() -> str:
    """A tag of the host, its start, and its network: containers have networks of their own."""
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with contextlib.suppress(OSError):
        facts.append(str(Path("/proc/self/ns/net").readlink()))
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()
