"""Beside other users of multicast DNS: neither disturbs the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.avahi import avahi_on
from support.hosts import Hosts
from support.seekers import Seeker, seekers
from support.threads import eventually

pytestmark = [pytest.mark.netns, pytest.mark.slow]


def test_avahi_and_potluck_live_on_one_machine(tmp_path: Path) -> None:
    """It sees our processes as it sees others; records of its making mislead nobody."""
    with (
        Hosts("alpha beta") as hosts,
        avahi_on(hosts["alpha"], tmp_path) as avahi,
        avahi.publishing("Living Room", "_http._tcp", 80),
        avahi.publishing("Living Room", "_potluck._tcp", 4712, "v=1", "t=nonsense", "p=0"),
        seekers(*(Seeker(tmp_path / name, host=host) for name, host in hosts.items())) as crowd,
    ):
        one, other = crowd
        one.wait_for("found", other.me)
        other.wait_for("found", one.me)

        def is_browsed() -> bool:
            ours = avahi.browse("_potluck._tcp")
            return all(host.ipv4 in ours for host in hosts.values()) and "Living" in ours

        eventually(is_browsed)
        assert "Living" in avahi.browse("_http._tcp")
        assert one.found() == {other.me}
        assert other.found() == {one.me}
