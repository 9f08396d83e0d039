"""Opening multicast DNS: on the right interfaces, with an error that helps, and not in children."""

from __future__ import annotations

import os
import socket
import stat

import psutil
import pytest
import zeroconf

from potluck.net.mdns import DiscoveryUnavailable, open_zeroconf, scoped, unscoped
from support.forks import in_child
from support.threads import eventually


def test_the_number_of_an_interface_becomes_its_name() -> None:
    """A link-local address is only good with its interface; other addresses need none."""
    loopback = socket.if_nametoindex("lo")
    assert scoped(f"fe80::1%{loopback}") == "fe80::1%lo"
    assert scoped("fe80::1%999999") == "fe80::1"
    assert scoped("fd00::1%3") == "fd00::1"
    assert scoped("10.0.0.1") == "10.0.0.1"
    assert unscoped("fe80::1%lo") == "fe80::1"


class _Deaf:
    """Zeroconf that notes what it was asked for, and cannot do it."""

    asked: list[list[str | int]]

    def __init__(self, interfaces: list[str | int]) -> None:
        self.asked.append(interfaces)
        self.engine = self
        self.senders: list[object] = []

    def close(self) -> None:
        """Nothing to close."""


def test_both_families_are_tried_then_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv6 by the interface's number, for that is what its multicast needs."""
    _Deaf.asked = []
    monkeypatch.setattr(zeroconf, "Zeroconf", _Deaf)
    index = socket.if_nametoindex("lo")
    with pytest.raises(DiscoveryUnavailable, match=r"no interface .* can multicast\. Do this\."):
        open_zeroconf(["127.0.0.1", "::1"], hint="Do this.", both=True)
    with pytest.raises(DiscoveryUnavailable):
        open_zeroconf(["127.0.0.1", "::1"], hint="Do this.")
    with pytest.raises(DiscoveryUnavailable):
        open_zeroconf(["::1"], hint="Do this.", both=True)
    has_ipv6 = any(entry.address == "::1" for entry in psutil.net_if_addrs()["lo"])
    first, third = ([["127.0.0.1", index]], [[index]]) if has_ipv6 else ([], [])
    assert _Deaf.asked == [*first, ["127.0.0.1"], ["127.0.0.1"], *third, ["::1"]]


def test_the_words_of_the_system_are_part_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for help can quote them."""

    def refused(**_options: object) -> None:
        raise OSError(98, "Address in use")

    monkeypatch.setattr(zeroconf, "Zeroconf", refused)
    with pytest.raises(DiscoveryUnavailable, match=r"Address in use\. Do this\."):
        open_zeroconf(["127.0.0.1"], hint="Do this.")


def test_a_forked_child_lets_go_of_the_sockets() -> None:
    """A data loader must not answer for its parent, nor keep the port."""
    opened = open_zeroconf(["127.0.0.1"], hint="")
    try:
        eventually(lambda: len(opened.engine.readers) > 1)
        numbers = [each.fileno for each in opened.engine.readers]
        assert in_child(lambda: [_is_socket(number) for number in numbers]) == [False, False]
        assert all(_is_socket(number) for number in numbers)  # ours are as they were
    finally:
        opened.close()


def test_a_forked_child_closes_nothing_that_is_not_its_parents_zeroconf() -> None:
    """One that was closed has numbers that belong to others by now."""
    opened = open_zeroconf(["127.0.0.1"], hint="")
    eventually(lambda: len(opened.engine.readers) > 1)
    numbers = [each.fileno for each in opened.engine.readers]
    opened.close()
    eventually(lambda: not any(map(_is_socket, numbers)))
    taken = [socket.socket() for _ in range(20)]
    try:
        again = [each.fileno() for each in taken if each.fileno() in numbers]
        assert again
        assert in_child(lambda: [_is_socket(number) for number in again]) == [True] * len(again)
    finally:
        for each in taken:
            each.close()


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
