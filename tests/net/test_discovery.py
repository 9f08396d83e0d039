"""Discovery as a whole: whoever belongs together meets, by whichever way works, and nobody else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from potluck.net.addresses import Address
from potluck.net.discovery import Advert, Changed, DiscoveryConfig, Found, Gone, Rendezvous
from potluck.net.known_peers import KnownPeers
from support.discovering import ATTIC, LAB, advert, alone, files_only, sighting, watchers
from support.quiet_network import service
from support.threads import eventually

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
        eventually(lambda: isinstance(watcher.look()[-1], Gone))
        (gone,) = [event for event in watcher.events if isinstance(event, Gone)]
        assert gone.sighting.process == leaves.process
        assert gone.reason in {"it said goodbye", "its process on this machine has ended"}


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
        assert isinstance(watcher.look()[-1], Changed)
        assert not any(isinstance(event, Gone) for event in watcher.events)


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
            assert foreigner.is_elsewhere.endswith(" belongs to another namespace")


def test_addresses_by_hand_and_of_a_launcher_are_there_at_once(
    service: str, tmp_path: Path
) -> None:
    """Without waiting for anything; our own among them is left out."""
    mine = advert("a", port=4711)
    given = (Address("10.0.0.9", 4711), Address("localhost", 4711), Address("desk", 1))
    config = replace(
        files_only(tmp_path), peers=given, rendezvous=Rendezvous((Address("10.0.0.9", 4711),))
    )
    with watchers(service, config, mine) as (watcher,):
        events = watcher.look()
        assert [type(event) for event in events] == [Found, Found]
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
