"""Faults of a network, injected into an emulated machine: what a firewall or a switch does."""

from __future__ import annotations

import functools
import shutil

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


def reject(host: Host, rule: str) -> None:
    """Let a host's firewall refuse what this rule matches, and say so as firewalld does."""
    drop(host)
    answer = ["reject", "with", "icmpx", "type", "admin-prohibited"]
    host.run(["nft", "add", "rule", "inet", "potluck", "input", *rule.split(), *answer])


def block_multicast(host: Host) -> None:
    """As many guest networks and firewalls do: nothing of multicast DNS goes in or out."""
    drop(host, "udp dport 5353")
    drop(host, "udp dport 5353", direction="output")


def isolate(hosts: Hosts) -> None:
    """As access points do that keep multicast from their clients."""
    for host in hosts.values():
        hosts.switch("link", "set", host._port, "type", "bridge_slave", "mcast_flood", "off")


def keep_apart(hosts: Hosts, *names: str) -> None:
    """As access points do with client isolation: these see the others, but not each other."""
    for name in names:
        hosts.switch("link", "set", hosts[name]._port, "type", "bridge_slave", "isolated", "on")
