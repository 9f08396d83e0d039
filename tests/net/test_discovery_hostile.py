"""Discovery among those who say anything at all: bounded, and nobody is led astray."""

from __future__ import annotations

import random
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from potluck.net.addresses import Address
from potluck.net.discovery_book import MAX_PER_SOURCE
from potluck.net.mdns_listening import MAX_NAMES
from potluck.net.mdns_records import Heard
from potluck.vocabulary import NodeId
from support.discovering import advert, alone, watchers
from support.quiet_network import Stranger, service
from support.threads import PATIENCE

__all__ = ["service"]


def test_a_flood_of_forged_peers_is_bounded_and_stalls_nobody(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know our tag, which is public; the node is woken once and reads a few hundred."""
    honest = advert("b")
    with watchers(service, alone(tmp_path), advert("a")) as (watcher,):
        found = replace(honest, node=NodeId("f" * 32))
        for number in range(1, 3000):
            heard = Heard(
                tag=found.tag,
                job_tag=found.job_tag,
                node=found.node,
                incarnation=number,
                version=1,
                addresses=(Address("10.0.0.1", 1),),
            )
            assert watcher.discovery._heard(f"name {number}", heard)
        begin = time.monotonic()
        assert len(watcher.look()) == MAX_PER_SOURCE
        assert time.monotonic() - begin < PATIENCE / 10
        with watchers(service, alone(tmp_path), honest):
            watcher.wait_for(honest)


def test_a_storm_of_real_packets_changes_nothing_for_the_honest(
    service: str, tmp_path: Path
) -> None:
    """Hundreds of forged records, then noise on the port: nothing ends, nothing grows."""
    honest = advert("b")
    with (
        watchers(service, alone(tmp_path), advert("a")) as (watcher,),
        Stranger(service) as stranger,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as noise,
    ):
        watcher.wait_until_open()
        for number in range(2 * MAX_NAMES):
            stranger.shout(replace(advert("f"), incarnation=number + 1))
        loopback = socket.inet_aton("127.0.0.1")
        noise.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, loopback)
        dice = random.Random(1)
        for size in range(1, 600, 2):
            noise.sendto(dice.randbytes(size), ("224.0.0.251", 5353))
            # An answer of sixteen records whose names point at themselves.
            noise.sendto(
                b"\0\0\x84\0\0\0\0\x10\0\0\0\0" + b"\xc0\x0c" * size, ("224.0.0.251", 5353)
            )
        with watchers(service, alone(tmp_path), honest):
            watcher.wait_for(honest)
        assert len(watcher.discovery.sightings()) <= MAX_NAMES
        assert len(watcher.discovery._names) <= MAX_NAMES


def test_a_record_that_becomes_somebody_else_is_not_both(service: str, tmp_path: Path) -> None:
    """One name, one process: what it was before is gone."""
    with watchers(service, alone(tmp_path), advert("a")) as (watcher,):
        first, second = (
            Heard(one.tag, one.job_tag, one.node, 1, 1, (Address("10.0.0.1", 1),))
            for one in (advert("b"), advert("c"))
        )
        assert watcher.discovery._heard("name", first)
        assert watcher.discovery._heard("name", second)
        assert [each.node for each in watcher.discovery.sightings()] == ["c" * 32]
        assert not watcher.discovery._heard("name", replace(second, tag="x" * 26))
        assert watcher.discovery.sightings() == []


def test_a_record_with_our_own_id_is_not_us(service: str, tmp_path: Path) -> None:
    """Somebody repeats what we say, with another address: we do not dial ourselves for it."""
    mine, other = advert("a"), advert("b")
    with (
        watchers(service, alone(tmp_path), mine) as (watcher,),
        Stranger(service) as stranger,
    ):
        stranger.forge(mine, "10.0.0.66")
        stranger.forge(other)
        watcher.wait_for(other)
        assert watcher.met == {other.process}
