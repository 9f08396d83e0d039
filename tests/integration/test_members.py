"""The roster decides who is in a group: machines with homes of their own, over real sockets."""

import contextlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from potluck.errors import HandshakeRefused
from potluck.net.addresses import Address
from potluck.trust.connect import OutgoingCall, dial, say_hello
from potluck.trust.membership_store import TrustStore, write_roster
from potluck.trust.roster_records import (
    RosterHistory,
    Rotation,
    Status,
    commitment_to,
    record_id,
    statement,
)
from potluck.wire_messages import Hello, Join, OpenReply, OpenRequest, RankEndpoint, Sync
from support.group_machines import (
    gather,
    impostor,
    leave,
    meet_soon,
    members_of,
    soon,
    start_all,
    start_on,
    stay,
)
from support.homes import Home, pair
from support.place import Place
from support.ranks import Ranks, new_master


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """The machine that founds the group."""
    return Home(tmp_path, "desk")


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    """A machine that the desk brings in."""
    return Home(tmp_path, "laptop")


@pytest.fixture
def nas(tmp_path: Path) -> Home:
    """A third one."""
    return Home(tmp_path, "nas")


def revoke(by: Home, target: Home) -> None:
    """What `potluck revoke` does."""
    by.membership().propose(lambda roster, secret: roster.revoke(target.me.node_id, by.me, secret))


def rotate(by: Home) -> None:
    """What `potluck rotate` does."""
    by.membership().propose(lambda roster, secret: roster.rotate(by.me, secret))


def agree(home: Home) -> None:
    """What the same command does on another machine."""
    membership = home.membership()
    (pending,) = membership.roster.pending
    membership.sign(pending.name)


def meet_shamelessly(place: Place, home: str) -> int:
    """Try to take part, although the roster here says that this machine has no place on it."""
    with mock.patch.object(TrustStore, "require_place"):
        return meet_soon(place, home)


def refused(ranks: Ranks, zero: Home, one: Home) -> list[str]:
    """Two machines that do not come together: what the errors of both say."""
    return [process.failure()["text"] for process in start_on(ranks, meet_soon, [zero, one])]


# --- who belongs ---


def test_machines_that_were_paired_work_together(
    ranks: Ranks, desk: Home, laptop: Home, nas: Home
) -> None:
    """Also two that have never met: laptop and nas know each other by the desk's word."""
    pair(desk, laptop)
    pair(desk, nas)
    assert laptop.members() == ["desk", "laptop"]
    gather(ranks, desk, laptop, nas)
    assert laptop.members() == nas.members() == ["desk", "laptop", "nas"]
    gather(ranks, nas, laptop)


def test_machines_that_were_never_paired_are_told_so(
    ranks: Ranks, desk: Home, laptop: Home
) -> None:
    """The first mistake that people make: both errors say what is wrong, and what to do."""
    waited, called = refused(ranks, desk, laptop)
    assert "it is not in our group" in waited
    assert "it belongs to another group" in called
    for text in (waited, called):
        assert "pair the two: potluck pair" in text


def test_a_fresh_key_under_the_secret_is_no_member(
    ranks: Ranks, desk: Home, laptop: Home, tmp_path: Path
) -> None:
    """Whoever copied the secret alone is refused as a rank and as rank 0, and both are told."""
    pair(desk, laptop)
    fresh = impostor(tmp_path, laptop)
    for zero, one in ((desk, fresh), (fresh, desk)):
        for text in refused(ranks, zero, one):
            assert "another group" in text
    gather(ranks, desk, laptop)


def test_a_revoked_machine_is_refused(ranks: Ranks, desk: Home, laptop: Home) -> None:
    """Whoever dials, and whoever listens; both are told who revoked it."""
    pair(desk, laptop)
    gather(ranks, desk, laptop)
    revoke(desk, laptop)
    for zero, one in ((desk, laptop), (laptop, desk)):
        for text in refused(ranks, zero, one):
            assert "laptop was revoked by desk" in text
    assert laptop.namespace().secret in desk.namespace().previous
    assert not laptop.namespace().has_secret(desk.namespace().secret)


def test_a_fresh_key_under_the_old_secret_is_refused(
    ranks: Ranks, desk: Home, laptop: Home, tmp_path: Path
) -> None:
    """The old secret alone gives nothing, with its roster or without."""
    pair(desk, laptop)
    fresh = impostor(tmp_path, laptop)
    copy = impostor(tmp_path, laptop, "copy")
    copy.membership().namespace.roster_path.write_bytes(laptop.namespace().roster_path.read_bytes())
    revoke(desk, laptop)
    parts = ((meet_soon, desk), (meet_soon, fresh)), ((meet_shamelessly, copy), (meet_soon, desk))
    for pair_of in parts:
        for process in start_all(ranks, list(pair_of)):
            assert "No machine with the id" in process.failure()["text"]
    for stranger in (fresh, copy):
        assert not stranger.namespace().has_secret(desk.namespace().secret)


def test_strangers_with_a_secret_do_not_disturb_a_group_that_works(
    ranks: Ranks, desk: Home, laptop: Home, nas: Home, tmp_path: Path
) -> None:
    """The revoked machine, and fresh keys under both secrets, at the door of every rank."""
    pair(desk, laptop)
    pair(desk, nas)
    gather(ranks, desk, laptop, nas)
    fresh_and_old = impostor(tmp_path, laptop, "old")
    revoke(desk, laptop)
    gather(ranks, desk, nas)
    agree(nas)
    gather(ranks, desk, nas)
    fresh_and_new = impostor(tmp_path, desk, "new")
    strangers = {
        laptop: "laptop was revoked by desk",
        fresh_and_old: "No machine with the id",
        fresh_and_new: "another group",
    }
    started = start_on(ranks, stay, [desk, nas])
    for process in started:
        port = int(process.expect("joined")["port"])
        for stranger, reason in strangers.items():
            for request in (
                Sync(),
                OpenRequest(bytes(16), 1, 0),
                Join(1, 2, RankEndpoint([], 1, "double")),
            ):
                with pytest.raises(HandshakeRefused, match=reason):
                    call(stranger, port, request)
            assert stranger.me.node_id in process.log
            assert reason in process.log
        assert isinstance(call(nas, port, Sync()), OpenReply)
    leave(started)


def call(home: Home, port: int, request: Hello) -> OpenReply:
    """Dial a rank from a machine."""
    members = members_of(home)
    where = OutgoingCall(Address("127.0.0.1", port), soon())
    with contextlib.closing(dial(members, where)) as sock:
        return say_hello(sock, request, OpenReply, members, soon())


# --- changes that need several machines ---


def test_three_machines_take_one_out(ranks: Ranks, desk: Home, laptop: Home, nas: Home) -> None:
    """The proposal travels when they connect, the second machine agrees, and the secret follows."""
    pair(desk, laptop)
    pair(desk, nas)
    gather(ranks, desk, laptop, nas)
    old = desk.namespace()
    revoke(desk, laptop)
    gather(ranks, desk, laptop, nas)
    assert desk.namespace() == nas.namespace() == old, "one signature of two changes nothing"
    (pending,) = nas.membership().roster.pending
    assert "Revoking laptop needs one more signature" in pending.reason
    agree(nas)
    gather(ranks, desk, nas)
    assert desk.namespace() == nas.namespace() != old
    assert desk.members() == nas.members() == ["desk", "nas"]
    for text in refused(ranks, nas, laptop):
        assert "laptop was revoked by desk" in text


@pytest.mark.parametrize("absentee_listens", [False, True])
def test_an_absentee_comes_back_after_a_rotation(
    ranks: Ranks, desk: Home, laptop: Home, nas: Home, absentee_listens: bool
) -> None:
    """It proves its key, checks the signatures, and gets the new secret; dialling or dialled."""
    pair(desk, laptop)
    pair(desk, nas)
    gather(ranks, desk, laptop, nas)
    rotate(desk)
    gather(ranks, desk, nas)
    agree(nas)
    gather(ranks, desk, nas)
    assert laptop.namespace() != desk.namespace()
    gather(ranks, *((laptop, desk) if absentee_listens else (desk, laptop)))
    assert laptop.namespace() == desk.namespace()
    assert laptop.membership().roster.generation.number == 1
    gather(ranks, nas, laptop)


def test_an_absentee_comes_back_through_a_group_that_works(
    ranks: Ranks, desk: Home, laptop: Home, nas: Home
) -> None:
    """The group is complete and takes nobody, but its members hand over what a member lacks."""
    pair(desk, laptop)
    pair(desk, nas)
    gather(ranks, desk, laptop, nas)
    rotate(desk)
    gather(ranks, desk, nas)
    agree(nas)
    master = new_master()
    started = start_on(ranks, stay, [desk, nas], master)
    for process in started:
        process.expect("joined")
    (late,) = start_on(ranks, meet_soon, [laptop], master, 1)
    assert "this group is complete" in late.failure()["text"]
    assert laptop.namespace() == desk.namespace()
    leave(started)


def test_guests_of_a_revoked_machine_have_to_be_paired_again(
    ranks: Ranks, desk: Home, laptop: Home, nas: Home
) -> None:
    """Whoever is in only through it goes too, and is told so; pairing brings it back."""
    pair(desk, laptop)
    pair(laptop, nas)
    gather(ranks, desk, laptop, nas)
    revoke(desk, laptop)
    gather(ranks, desk, nas)
    agree(nas)
    for text in refused(ranks, desk, nas):
        assert "nas was added through laptop, which was revoked" in text
    assert desk.membership().roster.status(nas.me.node_id) is Status.NEEDS_PAIRING
    assert not nas.namespace().has_secret(desk.namespace().secret)
    pair(desk, nas)
    gather(ranks, desk, nas)


def test_a_forged_rotation_moves_no_absentee(
    ranks: Ranks, desk: Home, laptop: Home, nas: Home, tmp_path: Path
) -> None:
    """The laptop, in wrong hands, revokes the desk with a vote that nobody knows."""
    pair(desk, laptop)
    pair(desk, nas)
    gather(ranks, desk, laptop, nas)
    old = nas.namespace()
    forge(laptop, desk, nas, tmp_path)
    few = "is signed by laptop, but 2 signatures of machines that this one knew are needed"
    assert few in refused(ranks, laptop, nas)[1]
    assert few in refused(ranks, nas, laptop)[0]
    assert nas.namespace() == old
    assert nas.membership().roster.generation.number == 0
    gather(ranks, desk, nas)


def forge(by: Home, against: Home, victim: Home, tmp_path: Path) -> None:
    """Change the secret by force: with a machine that exists only to vote."""
    membership, secret = by.membership(), b"f" * 32
    puppet = Home(tmp_path, "puppet")
    roster = membership.roster.admit(puppet.me.card, by.me)
    voters = tuple(sorted({by.me.node_id, puppet.me.node_id, victim.me.node_id}))
    forged = Rotation(
        roster.group_id,
        roster.generation.name,
        by.me.node_id,
        0,
        voters,
        against.me.node_id,
        voters,
        commitment_to(secret),
    )
    records = roster.history.records
    for voter in (by, puppet):
        signature = voter.me.sign(statement(forged))
        records = records.with_vote(forged, voter.me.node_id, signature)
    history = RosterHistory(records, (record_id(forged),))
    write_roster(membership.namespace, replace(roster, history=history))
    membership.namespace.rotated(secret).save()
