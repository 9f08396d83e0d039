"""Asking this machine's operating system about itself: short questions, each with a deadline."""

from __future__ import annotations

import contextlib
import ipaddress
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from potluck.core.topology_nodes import Battery
from potluck.net.addresses import Interface
from potluck.runtime.diagnosis.life import signs_of_life
from potluck.runtime.diagnosis.machine import Machine, TakenPort
from potluck.runtime.diagnosis.patience import within
from potluck.runtime.profile import local_profile

__all__ = ["gather_machine", "holder_of", "meaning_of", "parse_route", "router"]

RESOLVING = 2.0  # seconds for a name
ASKING = 4.0  # seconds for a program of the system; PowerShell takes one to start

_CATEGORY = "(Get-NetConnectionProfile).NetworkCategory"
_GATEWAY_FLAG = 2  # RTF_GATEWAY, from <linux/route.h>


def gather_machine(
    interfaces: Iterable[Interface], taken: Iterable[TakenPort] = (), *, usual: int = 0
) -> Machine:
    """Everything that can be found out without anybody else; takes seconds at most."""
    used = [each for each in interfaces if not each.skipped]
    gateway = within(ASKING, router, "")
    no_battery: Battery | None = None
    return Machine(
        system=platform.system(),
        release=platform.release(),
        program=sys.executable,
        name=socket.gethostname(),
        name_means=meaning_of(socket.gethostname()),
        networks=within(ASKING, lambda: _networks(used), ()),
        speeds=within(ASKING, lambda: _speeds(used), ()),
        gateway=gateway,
        gateway_life=within(ASKING, lambda: signs_of_life(gateway), "") if gateway else "",
        battery=within(ASKING, lambda: local_profile().battery, no_battery),
        taken=tuple(taken),
        usual=usual,
        network_category=within(ASKING + 1, _category, "") if sys.platform == "win32" else "",
    )


def meaning_of(name: str) -> tuple[str, ...]:
    """The addresses to which a name leads on this machine; empty if to none, or not in time."""

    def resolve() -> tuple[str, ...]:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(target[0]) for *_, target in found))

    return within(RESOLVING, resolve, ())


def holder_of(port: int) -> str:
    """The program that listens on a port of this machine; "" where the system does not tell."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr[1:] == (port,) and each.pid:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return ""


def _networks(used: Iterable[Interface]) -> tuple[str, ...]:
    import psutil

    names = {each.name for each in used}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses if name in names else ():
            if each.family == socket.AF_INET and each.netmask:
                found.append(str(ipaddress.ip_interface(f"{each.address}/{each.netmask}")))
            elif each.family == socket.AF_INET6 and each.netmask:
                length = int(ipaddress.IPv6Address(each.netmask)).bit_count()
                found.append(f"{each.address.partition('%')[0]}/{length}")
    return tuple(found)


def _speeds(used: Iterable[Interface]) -> tuple[tuple[str, int], ...]:
    import psutil

    state = psutil.net_if_stats()
    return tuple(
        (each.name, state[each.name].speed)
        for each in used
        if each.name in state and 0 < state[each.name].speed < 1 << 20  # unknown is 0 or 2**32 - 1
    )


def router(table: Path = Path("/proc/net/route")) -> str:
    """The address of this machine's router; "" where there is none, or nobody tells."""
    if sys.platform == "darwin":
        text = _output_of("/sbin/route", "-n", "get", "default")
        found = re.search(r"gateway: ([0-9.]+)", text)
        return found[1] if found else ""
    if sys.platform == "win32":
        return ""
    return parse_route(table.read_text())


def parse_route(table: str) -> str:
    r"""The router in a routing table of Linux.

    >>> parse_route("Iface Destination Gateway Flags\neth0 00000000 0100000A 0003 0 0 0 0 0 0 0")
    '10.0.0.1'
    """
    for line in table.splitlines()[1:]:
        _, destination, gateway, flags, *_ = line.split()
        if int(destination, 16) == 0 and int(flags, 16) & _GATEWAY_FLAG:
            return str(ipaddress.IPv4Address(int(gateway, 16).to_bytes(4, sys.byteorder)))
    return ""


def _category() -> str:
    return _output_of("powershell", "-NoProfile", "-Command", _CATEGORY).strip()


def _output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASKING, check=False)  # noqa: S603
    return done.stdout
