"""Faults of a network, injected into an emulated machine: what a firewall or a switch does."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest

from support.hosts import Host, Hosts


@functools.cache
def _why_no_firewall() -> str | None:
    return None if shutil.which("nft") else "a firewall needs the program nft (Debian: nftables)"


def drop(host: Host, *rules: str, direction: str = "input") -> None:
    """Let a host's firewall drop what these rules of nftables match, without a word."""
    reason = _why_no_firewall()
    if reason is not None:
        pytest.skip(reason)
    table = ["nft", "add", "table", "inet", "potluck"]
    hook = f"{{ type filter hook {direction} priority 0; policy accept; }}"
    chain = ["nft", "add", "chain", "inet", "potluck", direction, hook]
    host.run(table)
    host.run(chain)
    for rule in rules:
        host.run(["nft", "add", "rule", "inet", "potluck", direction, *rule.split(), "drop"])


def block_multicast(host: Host) -> None:
    """As many guest networks and firewalls do: nothing of multicast DNS goes in or out."""
    drop(host, "udp dport 5353")
    drop(host, "udp dport 5353", direction="output")


def isolate(hosts: Hosts) -> None:
    """As access points do that keep multicast from their clients."""
    for host in hosts.values():
        port = ["link", "set", host._port, "type", "bridge_slave", "mcast_flood", "off"]
        subprocess.run(["ip", "-n", hosts._switch, *port], check=True)
