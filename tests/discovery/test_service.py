"""Discovery as a whole: whoever belongs together meets, by whichever way works, and nobody else."""

from __future__ import annotations

import os
import random
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from potluck._types import NodeId
from potluck.discovery.local import KnownPeers
from potluck.discovery.mdns import MAX_NAMES, MdnsRecord
from potluck.discovery.records import (
    Advert,
    DiscoveryConfig,
    LauncherRendezvous,
    PeerChanged,
    PeerFound,
    PeerGone,
)
from potluck.discovery.service import MAX_ADDRESSES, MAX_PER_SOURCE, SightingTable, own_addresses
from potluck.net.addresses import Address
from support.discovering import ATTIC, LAB, advert, alone, files_only, sighting, watchers
from support.quiet_network import Stranger, service
from support.threads import PATIENCE, eventually

__all__ = ["service"]


@pytest.mark.parametrize("way", [alone, files_only])
def test_those_who_belong_together_meet(service: str, tmp_path: Path, way: object) -> None:
    """Over the network, and without one; each is found once, and the node is woken."""
    assert callable(way)
    shown = [advert("a"), advert("b"), advert("a")]
    with watchers(service, way(tmp_path), *shown) as crowd:
        for watcher in crowd:
            others = [each for each in shown if each is not watcher.advert]
            watcher.wait_for(*others)
            assert watcher.woken.is_set()
            assert watcher.met == {each.process for each in others}


def test_a_process_seen_in_two_ways_is_one(service: str, tmp_path: Path) -> None:
    """A neighbour that is heard on the network too: both addresses, one key."""
    with watchers(service, DiscoveryConfig(home=tmp_path), advert("a"), advert("a")) as (
        one,
        other,
    ):
        eventually(
            lambda: [each.sources for each in one.discovery.sightings()] == [("mdns", "neighbour")]
        )
        assert one.met == {other.advert.process}
        status = one.discovery.status()
        assert status["neighbour"] == "1 other processes on this machine"
        assert status["mdns"] == "listening on 127.0.0.1"
        assert status["known"] == "0 peers of earlier runs"


def test_a_process_of_this_machine_without_a_note_has_ended(service: str, tmp_path: Path) -> None:
    """It is heard by multicast, but another process has removed its note before we saw it."""
    alive, copied, ended, other_user = advert("a"), advert("a"), advert("a"), advert("b")
    with (
        watchers(service, DiscoveryConfig(home=tmp_path), advert("a"), alive) as (watcher, _),
        Stranger(service) as stranger,
    ):
        stranger.forge(copied, "10.0.0.66")  # our key on another machine: its notes are there
        stranger.forge(other_user)  # with a POTLUCK_HOME and a key of their own
        stranger.forge(ended)
        watcher.wait_for(alive, copied, other_user)
        eventually(lambda: len(watcher.discovery._names) == 4)  # heard
        eventually(lambda: len(watcher.discovery.sightings()) == 3)
        assert watcher.sees(alive, copied, other_user)
        assert not watcher.sees(ended)
        for event in watcher.events:
            if isinstance(event, PeerGone):
                assert event.reason == "its process on this machine has ended"


@pytest.mark.parametrize("way", [alone, files_only])
def test_namespaces_and_jobs_side_by_side_never_mix(
    service: str, tmp_path: Path, way: object
) -> None:
    """Two namespaces, and two jobs in one of them, with two processes each."""
    assert callable(way)
    places = [(LAB, "train.py"), (LAB, "other.py"), (ATTIC, "train.py")]
    shown = [advert("ab"[n], namespace=s, job=job) for s, job in places for n in range(2)]
    with watchers(service, way(tmp_path), *shown) as crowd:
        for first, second in zip(crowd[::2], crowd[1::2], strict=True):
            first.wait_for(second.advert)
            second.wait_for(first.advert)
        for first, second in zip(crowd[::2], crowd[1::2], strict=True):
            assert first.met == {second.advert.process}
            assert second.met == {first.advert.process}


@pytest.mark.parametrize("way", [alone, files_only])
def test_whoever_leaves_says_goodbye(service: str, tmp_path: Path, way: object) -> None:
    """The others are told at once, with the reason."""
    assert callable(way)
    stays, leaves = advert("a"), advert("a")
    with watchers(service, way(tmp_path), stays) as (watcher,):
        with watchers(service, way(tmp_path), leaves):
            watcher.wait_for(leaves)
        eventually(lambda: isinstance(watcher.look()[-1], PeerGone))
        (gone,) = [event for event in watcher.events if isinstance(event, PeerGone)]
        assert gone.sighting.process == leaves.process
        assert gone.reason in {"it left", "its process on this machine has ended"}


@pytest.mark.parametrize("way", [alone, files_only])
def test_a_change_reaches_the_others(service: str, tmp_path: Path, way: object) -> None:
    """Another port is a change of the same process; it is never gone in between."""
    assert callable(way)
    one, other = advert("a"), advert("b", port=1)
    with watchers(service, way(tmp_path), one, other) as (watcher, changing):
        watcher.wait_for(other)
        changing.discovery.update(replace(other, port=2))
        eventually(
            lambda: [each.addresses[0].port for each in watcher.discovery.sightings()] == [2]
        )
        assert isinstance(watcher.look()[-1], PeerChanged)
        assert not any(isinstance(event, PeerGone) for event in watcher.events)


def test_after_a_rotation_all_meet_again(service: str, tmp_path: Path) -> None:
    """One has rotated: the absentee still finds it; then it follows, and both see each other."""
    one, other = advert("a"), advert("b")
    renewed = LAB.rotated(b"n" * 32)

    def after(shown: Advert) -> Advert:
        new = advert(namespace=renewed)
        return replace(shown, tag=new.tag, job_tag=new.job_tag, old_tags=new.old_tags)

    with watchers(service, DiscoveryConfig(home=tmp_path), one, other) as (watcher, absentee):
        watcher.wait_for(other)
        watcher.discovery.update(after(one))
        eventually(lambda: [each.job_tag for each in absentee.discovery.sightings()] == [""])
        absentee.discovery.update(after(other))
        for each in (watcher, absentee):
            eventually(
                lambda each=each: (
                    [  # type: ignore[misc]
                        (seen.job_tag, seen.sources) for seen in each.discovery.sightings()
                    ]
                    == [(after(one).job_tag, ("mdns", "neighbour"))]
                )
            )


def test_an_observer_sees_and_is_not_seen(service: str, tmp_path: Path) -> None:
    """It has no port, or was told not to announce."""
    member, quiet = advert("a"), advert("b")
    config = DiscoveryConfig(home=tmp_path)
    with (
        watchers(service, config, member) as (watcher,),
        watchers(service, config, advert("b", port=0)) as (observer,),
        watchers(service, replace(config, announce=False), quiet) as (other,),
    ):
        observer.wait_for(member)
        other.wait_for(member)
        assert watcher.met == set()


@pytest.mark.parametrize("way", [alone, files_only])
def test_an_observer_of_all_jobs_sees_them_all(service: str, tmp_path: Path, way: object) -> None:
    """Without a job of its own; other namespaces stay out of sight."""
    assert callable(way)
    one, other, stranger = advert("a"), advert("b", job="x.py"), advert("c", namespace=ATTIC)
    looking = replace(advert("d", port=0), job_tag="")
    with (
        watchers(service, way(tmp_path), one, other, stranger),
        watchers(service, way(tmp_path), looking) as (observer,),
    ):
        observer.wait_for(one, other)
        assert observer.met == {one.process, other.process}
        assert {each.job_tag for each in observer.discovery.sightings()} == {
            one.job_tag,
            other.job_tag,
        }
        if way is alone:  # who is not of ours is only heard of by multicast
            eventually(lambda: observer.discovery.strangers == 1)
            (foreigner,) = observer.discovery.foreigners
            assert foreigner.node == stranger.node
            assert foreigner.is_elsewhere.endswith(" belongs to another group")


def test_addresses_by_hand_and_of_a_launcher_are_there_at_once(
    service: str, tmp_path: Path
) -> None:
    """Without waiting for anything; our own among them is left out."""
    mine = advert("a", port=4711)
    given = (Address("10.0.0.9", 4711), Address("localhost", 4711), Address("desk", 1))
    config = replace(
        files_only(tmp_path),
        peers=given,
        rendezvous=LauncherRendezvous((Address("10.0.0.9", 4711),)),
    )
    with watchers(service, config, mine) as (watcher,):
        events = watcher.look()
        assert [type(event) for event in events] == [PeerFound, PeerFound]
        assert {event.sighting.key: event.sighting.sources for event in events} == {
            "10.0.0.9:4711": ("environment", "given"),
            "desk:1": ("given",),
        }
        assert all(event.sighting.node is None for event in events)


def test_peers_of_the_last_run_are_tried(service: str, tmp_path: Path) -> None:
    """What one run remembers, the next one starts with; closing waits until it is written."""
    with watchers(service, files_only(tmp_path), advert("a")) as (watcher,):
        watcher.discovery.remember([sighting("b", "10.0.0.2", name="desk")])
    with watchers(service, files_only(tmp_path), advert("a")) as (watcher,):
        eventually(lambda: bool(watcher.look()))
        (event,) = watcher.events
        assert (event.sighting.node, event.sighting.name) == ("b" * 32, "desk")
        assert event.sighting.sources == ("known",)
    forgetful = replace(files_only(tmp_path), known=False)
    with watchers(service, forgetful, advert("a")) as (watcher,):
        watcher.discovery.remember([sighting("c")])
        assert watcher.look() == []
    assert len(KnownPeers(tmp_path).recall(advert("a"))) == 1


def test_a_home_that_cannot_be_used_stops_only_what_needs_it(service: str, tmp_path: Path) -> None:
    """The network still works, and the reason can be read."""
    home = tmp_path / "home"
    home.write_text("in the way")
    one, other = advert("a"), advert("b")
    with watchers(service, DiscoveryConfig(home=home), one, other) as (watcher, _):
        watcher.discovery.remember([sighting("c")])
        watcher.wait_for(other)
        eventually(lambda: "could not be kept" in watcher.discovery.status()["known"])
        assert "could not be created" in watcher.discovery.status()["neighbour"]


def test_another_version_is_reported_so_that_one_can_say_so(service: str, tmp_path: Path) -> None:
    """Silence would leave its owner wondering."""
    newer = replace(advert("b"), version=99)
    with watchers(service, alone(tmp_path), advert("a"), newer) as (watcher, _):
        watcher.wait_for(newer)
        assert [each.version for each in watcher.discovery.sightings()] == [99]


def test_a_forked_child_closes_without_waiting(service: str, tmp_path: Path) -> None:
    """A thread of the parent may have held a lock at the fork; the parent's note stays."""
    shown = advert("a")
    with watchers(service, files_only(tmp_path), shown, advert("b")) as (watcher, other):
        other.wait_for(shown)
        with watcher.discovery._news:
            child = os.fork()
            if child == 0:
                watcher.discovery.close()
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert other.sees(shown)


def test_closing_twice_does_no_harm(service: str, tmp_path: Path) -> None:
    """As with every other door."""
    with watchers(service, DiscoveryConfig(home=tmp_path), advert("a")) as (watcher,):
        watcher.discovery.close()
        watcher.discovery.close()
        assert watcher.look() == []


# --------------------------------------------------------------------------------------------------
# The book of sightings: sources merged, one event for each process, however long nobody reads.


class Bell:
    """Counts how often it was rung."""

    def __init__(self) -> None:
        self.rung = 0

    def __call__(self) -> None:
        """Ring."""
        self.rung += 1


def test_what_comes_changes_and_goes_is_told_in_turn() -> None:
    """Found, changed, gone with its reason; and nothing twice."""
    book = SightingTable(Bell())
    first, moved = sighting("a", "10.0.0.1"), sighting("a", "10.0.0.2")
    book.report("mdns", first)
    assert book.drain() == [PeerFound(first)]
    assert book.drain() == []
    book.report("mdns", first)
    assert book.drain() == []
    book.report("mdns", moved)
    assert book.drain() == [PeerChanged(moved)]
    book.withdraw("mdns", moved.key, "it left")
    assert book.drain() == [PeerGone(moved, "it left")]
    book.withdraw("mdns", moved.key, "again")
    assert book.drain() == []


def test_what_nobody_reads_does_not_pile_up() -> None:
    """Ten thousand changes are one event, and one call; whoever came and went was never there."""
    bell = Bell()
    book = SightingTable(bell)
    for number in range(10_000):
        book.report("mdns", sighting("a", f"10.0.{number % 200}.1"))
        book.report("mdns", sighting("b"))
        book.withdraw("mdns", sighting("b").key, "gone")
    assert bell.rung == 1
    assert book.drain() == [PeerFound(sighting("a", "10.0.199.1"))]
    book.report("mdns", sighting("b"))
    assert bell.rung == 2


def test_several_sources_of_one_process_are_one_sighting() -> None:
    """With everybody's addresses, the shortest way first; it is gone when the last one says so."""
    book = SightingTable(Bell())
    book.report("mdns", sighting("a", "10.0.0.1", "fd00::1"))
    book.report("neighbour", sighting("a", "127.0.0.1", source="neighbour", name="desk"))
    (event,) = book.drain()
    assert event.sighting.sources == ("mdns", "neighbour")
    hosts = [address.host for address in event.sighting.addresses]
    assert hosts == ["127.0.0.1", "10.0.0.1", "fd00::1"]
    assert event.sighting.name == "desk"
    book.withdraw("mdns", event.sighting.key, "it left")
    assert [type(each) for each in book.drain()] == [PeerChanged]
    book.withdraw("neighbour", event.sighting.key, "it ended")
    (gone,) = book.drain()
    assert isinstance(gone, PeerGone)
    assert gone.reason == "it ended"


def test_a_bare_address_makes_way_for_the_process_that_has_it() -> None:
    """And comes back when that is gone: whoever gave it wants it tried."""
    book = SightingTable(Bell())
    bare = sighting("", "10.0.0.1", source="given")
    book.report("given", bare)
    assert book.drain() == [PeerFound(bare)]
    process = sighting("a", "10.0.0.1", "10.0.0.2")
    book.report("mdns", process)
    assert book.drain() == [PeerGone(bare, "it was found under its own name"), PeerFound(process)]
    book.withdraw("mdns", process.key, "it left")
    assert book.drain() == [PeerGone(process, "it left"), PeerFound(bare)]


def test_an_address_of_our_own_is_nobody() -> None:
    """The same list of peers can be given to all machines."""
    book = SightingTable(Bell())
    book.exclude(own_addresses(["10.0.0.1"], 4711))
    for host in ("10.0.0.1", "localhost", "127.0.0.1"):
        book.report("given", sighting("", host, source="given"))
    book.report("given", sighting("", "10.0.0.2", source="given"))
    book.report("given", sighting("", "10.0.0.1", port=4712, source="given"))
    found = {event.sighting.addresses[0] for event in book.drain()}
    assert found == {Address("10.0.0.2", 4711), Address("10.0.0.1", 4712)}


def test_a_known_peer_makes_way_for_a_living_process_of_its_machine() -> None:
    """Its port of the last run is of no use once it is heard itself."""
    book = SightingTable(Bell())
    known = sighting("a", "10.0.0.1", incarnation=0, port=1, source="known")
    other = sighting("b", "10.0.0.2", incarnation=0, port=1, source="known")
    book.replace("known", [known, other], "")
    assert len(book.drain()) == 2
    book.report("mdns", sighting("a", "10.0.0.1"))
    assert {each.node for each in book.sightings()} == {known.node, other.node}
    assert book.drain()[0] == PeerGone(known, "it was found under its own name")


def test_a_source_is_bounded_and_pushes_out_only_its_own() -> None:
    """A flood of forged records costs memory for three hundred, and hides no neighbour."""
    book = SightingTable(Bell())
    book.report("neighbour", sighting("b", source="neighbour"))
    for number in range(1, 5 * MAX_PER_SOURCE):
        book.report("mdns", sighting("a", incarnation=number))
    seen = book.sightings()
    assert len(seen) == MAX_PER_SOURCE + 1
    assert sighting("b", source="neighbour") in seen
    assert sighting("a", incarnation=5 * MAX_PER_SOURCE - 1) in seen


def test_one_process_has_a_bounded_number_of_addresses() -> None:
    """Of all sources together."""
    book = SightingTable(Bell())
    for source in ("mdns", "known"):
        hosts = [f"{len(source)}.0.0.{number}" for number in range(10)]
        book.report(source, sighting("a", *hosts, source=source))
    (seen,) = book.sightings()
    assert len(seen.addresses) == MAX_ADDRESSES


def test_replacing_what_a_source_sees_tells_the_difference() -> None:
    """Those who stay are not mentioned."""
    book = SightingTable(Bell())
    one, two, three = (sighting(letter, source="neighbour") for letter in "abc")
    book.replace("neighbour", [one, two], "")
    assert len(book.drain()) == 2
    book.replace("neighbour", [two, three], "its process has ended")
    assert book.drain() == [PeerGone(one, "its process has ended"), PeerFound(three)]


# --------------------------------------------------------------------------------------------------
# Discovery among those who say anything at all: bounded, and nobody is led astray.

__all__ = ["service"]


def test_a_flood_of_forged_peers_is_bounded_and_stalls_nobody(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know our tag, which is public; the node is woken once and reads a few hundred."""
    honest = advert("b")
    with watchers(service, alone(tmp_path), advert("a")) as (watcher,):
        found = replace(honest, node=NodeId("f" * 32))
        for number in range(1, 3000):
            heard = MdnsRecord(
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
            MdnsRecord(one.tag, one.job_tag, one.node, 1, 1, (Address("10.0.0.1", 1),))
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
