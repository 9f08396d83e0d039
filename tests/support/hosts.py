"""Emulated machines: network namespaces that a bridge joins, each with an ``eth0`` of its own.

    with Hosts("desk laptop", rate="1gbit") as hosts:
        hosts["desk"].run(["python", "train.py"])

Every host has an IPv4 and an IPv6 address and knows the others by name.  The bridge lives in a
namespace too, so nothing on the real machine's own network changes.  Names contain the number of
the process that made them; what a dead process left behind is removed by the next one.  Needs root
and the program ``ip`` (and ``tc`` for a rate).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

NETWORK_4, NETWORK_6 = "10.66.0", "fd66:"
INTERFACE = "eth0"
AIR = "air"

_OURS = re.compile(r"potluck-(\d+)-\d+-\w+")
_FILES = Path("/etc/netns")  # what lies here under a namespace's name replaces /etc/… inside it
_numbers = itertools.count(1)


class Host:
    """One emulated machine."""

    def __init__(self, name: str, namespace: str, number: int) -> None:
        self.name = name
        self.namespace = namespace
        self.ipv4 = f"{NETWORK_4}.{number}"
        self.ipv6 = f"{NETWORK_6}:{number:x}"
        self.is_wireless = False
        """Whether programs on it find that its interface is a radio."""
        self._port = f"port{number}"  # the other end of its cable, at the switch

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs a program on this host, as its user's shell would."""
        # The shell sets the host's own name, which is part of the namespace that unshare makes.
        script = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        if self.is_wireless:  # the mounts of this namespace are its own
            radio = f"/sys/class/net/{INTERFACE}/wireless"
            script = f"mount -t tmpfs air /sys/class/net && mkdir -p {radio} && {script}"
        inside = ["unshare", "--uts", "sh", "-c", script, self.name, *arguments]
        return ["ip", "netns", "exec", self.namespace, *inside]

    def run(
        self, arguments: Sequence[str], *, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this host to its end; with ``check`` it must not fail."""
        return _run(*self.command(arguments), check=check)

    def ip(self, *arguments: str) -> None:
        """Change the host's network with the program ``ip``."""
        _run("ip", "-n", self.namespace, *arguments)

    def refuse_silently(self, other: Host) -> None:
        """Answer nothing that ``other`` sends, like a firewall that drops packets."""
        self.ip("route", "add", "blackhole", other.ipv4)
        self.ip("-6", "route", "add", "blackhole", other.ipv6)
        self.ip("-6", "address", "flush", "dev", INTERFACE, "scope", "link")  # no other way in

    def unplug(self) -> None:
        """Pull the cable out: whoever is connected learns nothing of it."""
        self.ip("link", "set", INTERFACE, "down")

    def plug_in(self) -> None:
        """Put the cable back; addresses of IPv6 were lost with it."""
        self.ip("link", "set", INTERFACE, "up")
        self.ip("address", "replace", f"{self.ipv6}/64", "dev", INTERFACE, "nodad")


class Hosts(Mapping[str, Host]):
    """Machines on one switch, by name; used as a context manager.

    ``rate`` limits every cable in both directions, in the words of ``tc`` ("100mbit"); single
    cables can be changed with :meth:`limit`.  With ``own_loopback`` a host's own name means
    127.0.1.1 on that host and its address on the others, as Debian sets it up.
    """

    def __init__(
        self, names: str | Sequence[str], *, rate: str | None = None, own_loopback: bool = False
    ) -> None:
        remove_leftovers()
        names = names.split() if isinstance(names, str) else names
        prefix = f"potluck-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{prefix}-switch"
        self._hosts = {
            name: Host(name, f"{prefix}-{number}", number) for number, name in enumerate(names, 1)
        }
        self._rate = rate
        self._own_loopback = own_loopback

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Self:
        """Build the network."""
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove it, with every process that still runs in it."""
        self.close()

    def close(self) -> None:
        """Remove the network, with every process that still runs in it."""
        for namespace in [*(host.namespace for host in self.values()), self._switch]:
            _remove(namespace)

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in self.values():
            self._connect(host)
            files = _FILES / host.namespace
            files.mkdir(parents=True)
            (files / "hosts").write_text(self._names_seen_by(host))
            (files / "resolv.conf").write_text("")  # no name server: an unknown name fails at once
        if self._rate is not None:
            for name in self:
                self.limit(name, self._rate)

    def _connect(self, host: Host) -> None:
        _run("ip", "netns", "add", host.namespace)
        peer = ["peer", "name", host._port, "netns", self._switch]
        host.ip("link", "add", INTERFACE, "type", "veth", *peer)
        _run("ip", "-n", self._switch, "link", "set", host._port, "master", "bridge", "up")
        host.ip("link", "set", "lo", "up")
        host.ip("link", "set", INTERFACE, "up")
        host.ip("address", "add", f"{host.ipv4}/24", "dev", INTERFACE)
        host.ip("address", "add", f"{host.ipv6}/64", "dev", INTERFACE, "nodad")

    def _names_seen_by(self, host: Host) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for other in self.values():
            if other is host and self._own_loopback:
                lines.append(f"127.0.1.1 {other.name}")
            else:
                lines += [f"{other.ipv4} {other.name}", f"{other.ipv6} {other.name}"]
        return "\n".join([*lines, ""])

    def switch(self, *arguments: str) -> None:
        """Change something at the switch with the program ``ip``."""
        _run("ip", "-n", self._switch, *arguments)

    def write(self, name: str, file: str, text: str) -> None:
        """Give a host another file in its ``/etc``."""
        (_FILES / self[name].namespace / file).write_text(text)

    def limit(self, name: str, rate: str) -> None:
        """Let a host's cable carry ``rate`` in each direction."""
        host = self[name]
        # A burst must hold the largest packet before segmentation; the queue is worth 50 ms.
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        _run("tc", "-n", host.namespace, "qdisc", "replace", "dev", INTERFACE, *shape)
        _run("tc", "-n", self._switch, "qdisc", "replace", "dev", host._port, *shape)

    def share_air(self, names: Sequence[str], rate: str) -> None:
        """Put hosts on one access point: whatever one of them sends or receives takes its time.

        The bridge is the access point.  What enters and what leaves it by the ports of these hosts
        waits in one queue: a packet between two of them twice, in and out.
        """
        inside = ["-n", self._switch]
        _run("ip", *inside, "link", "add", AIR, "type", "ifb")
        _run("ip", *inside, "link", "set", AIR, "up")
        shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
        _run("tc", *inside, "qdisc", "add", "dev", AIR, "root", *shape)
        everything = ["protocol", "all", "u32", "match", "u32", "0", "0"]
        redirect = ["action", "mirred", "egress", "redirect", "dev", AIR]
        for host in map(self.__getitem__, names):
            host.is_wireless = True
            port = ["dev", host._port]
            _run("tc", *inside, "qdisc", "add", *port, "ingress")
            _run("tc", *inside, "qdisc", "add", *port, "root", "handle", "1:", "htb")
            for parent in ("ffff:", "1:"):
                _run(
                    "tc", *inside, "filter", "add", *port, "parent", parent, *everything, *redirect
                )

    @property
    def airtime(self) -> int:
        """Bytes that have crossed the air so far."""
        shown = _run("tc", "-n", self._switch, "-s", "-j", "qdisc", "show", "dev", AIR).stdout
        return int(json.loads(shown)[0]["bytes"])


def remove_leftovers() -> None:
    """Remove the networks of processes that ended without doing so."""
    with contextlib.suppress(FileNotFoundError):
        for path in Path("/run/netns").iterdir():
            match = _OURS.fullmatch(path.name)
            if match is not None and not Path("/proc", match[1]).exists():
                _remove(path.name)


def _remove(namespace: str) -> None:
    for number in _run("ip", "netns", "pids", namespace, check=False).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)
    _run("ip", "netns", "delete", namespace, check=False)
    shutil.rmtree(_FILES / namespace, ignore_errors=True)


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and result.returncode:
        msg = f"{' '.join(command)}: {result.stderr.strip()}"
        raise RuntimeError(msg)
    return result
