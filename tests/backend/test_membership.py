"""Who may connect to this process: what is on the disk counts, whoever put it there."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.backend.membership import Membership
from potluck.core.handshake import Refused
from potluck.core.introduction import Exchange, Granted, digest
from potluck.core.roster import RosterRefused
from potluck.core.roster_exchange import Verdict
from potluck.errors import HandshakeRefused
from potluck.messages import Introduction, Told
from potluck.net.identity import NodeIdentity
from potluck.net.namespace import NetworkNamespace, SecurityWarning
from potluck.net.private_files import DamagedFile
from potluck.net.security import Security
from support.circles import members_of
from support.homes import Home, pair

PASSPHRASE = "unruly copper migrant walnut tracing spoof"  # noqa: S105  an example


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """A machine."""
    return Home(tmp_path, "desk")


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    """Another one."""
    return Home(tmp_path, "laptop")


def told_by(members: Membership) -> Introduction:
    """What its hello says about its roster, and nothing of its machine."""
    return Introduction(members.introduction().roster)


# --- which namespaces have a roster ---


def test_a_namespace_that_is_kept_here_has_a_roster(desk: Home) -> None:
    """It is founded on first use."""
    members = members_of(desk)
    assert members.roster is not None
    assert [member.name for member in members.roster.members] != []
    assert members.introduction().roster == digest(desk.circle().roster)


def test_where_nothing_is_kept_whoever_has_the_secret_belongs(desk: Home) -> None:
    """A passphrase, kept or not; the open namespace; a secret that is not kept."""
    passphrase = NetworkNamespace.from_passphrase("lab", PASSPHRASE, home=desk.path)
    with pytest.warns(SecurityWarning):
        namespaces = [passphrase, NetworkNamespace.open()]
    namespaces.append(NetworkNamespace.generate(home=desk.path))
    passphrase.save()
    namespaces.append(NetworkNamespace.load("lab", home=desk.path))
    stranger = NodeIdentity.ephemeral().id
    for namespace in namespaces:
        members = Membership(Security(namespace, NodeIdentity.ephemeral()))
        tag = namespace.discovery_tag
        assert members.roster is None
        assert members.introduction().roster == b""
        assert members.judge_hello(stranger, Introduction(b"d" * 32), tag) == Granted()
        assert members.judge_peer(stranger) is None
        assert members.tell(stranger, tag) == Told()
        assert members.bequeath(stranger, tag) is None
        with pytest.raises(HandshakeRefused, match="this side has none"):
            members.take(stranger, Told())
        members.met(stranger)
        members.inherit(bytes(32))
        assert members.security.namespace is namespace


# --- the disk ---


def test_what_is_damaged_is_told_at_once(desk: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when somebody calls."""
    monkeypatch.setenv("POTLUCK_HOME", str(desk.path))
    assert Membership.load().roster == desk.circle().roster
    desk.namespace().roster_path.write_bytes(b"damaged")
    with pytest.raises(DamagedFile, match="potluck unpair home"):
        Membership.load()


def test_a_machine_that_is_not_on_its_own_roster_is_told_at_once(
    desk: Home, laptop: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key was deleted, or its files were copied: nobody would let it in."""
    pair(desk, laptop)
    monkeypatch.setenv("POTLUCK_HOME", str(laptop.path))
    (laptop.path / "node_keypair").unlink()
    with pytest.raises(RosterRefused, match=r'not a member of "home".*key was replaced.*Pair it'):
        Membership.load()


def test_what_another_process_of_this_machine_changes_is_noticed(desk: Home, laptop: Home) -> None:
    """A command pairs a machine, or changes the secret, while this process runs."""
    members = members_of(desk)
    tag = members.security.namespace.discovery_tag
    assert isinstance(members.judge_peer(laptop.me.node_id), Refused)
    pair(desk, laptop)
    assert members.judge_peer(laptop.me.node_id) is None
    desk.circle().propose(lambda roster, secret: roster.revoke(laptop.me.node_id, desk.me, secret))
    assert isinstance(members.judge_peer(laptop.me.node_id), Refused)
    assert members.security.namespace == desk.namespace()
    assert not members.security.is_current(tag)


def test_who_left_a_namespace_ends_with_what_it_knew(desk: Home) -> None:
    """A process that runs while `potluck unpair` is called does not found the namespace again."""
    members = members_of(desk)
    roster = members.roster
    desk.namespace().delete()
    assert members.roster is roster
    assert NetworkNamespace.stored(home=desk.path) == []


# --- telling and taking ---


def test_an_earlier_secret_is_answered_with_the_new_one_for_members_alone(
    desk: Home, laptop: Home, tmp_path: Path
) -> None:
    """The desk has changed the secret with the laptop's signature, and lets another one in."""
    pair(desk, laptop)
    ours, theirs = members_of(desk), members_of(laptop)
    old = laptop.namespace()
    desk.circle().propose(lambda roster, secret: roster.rotate(desk.me, secret))
    taken = theirs.take(desk.me.node_id, ours.tell(laptop.me.node_id, old.discovery_tag))
    assert taken.verdict is Verdict.CURRENT
    (pending,) = taken.roster.pending
    laptop.circle().sign(pending.name)
    assert theirs.tell(desk.me.node_id, old.discovery_tag).secret == b"", "it has none to give"
    assert theirs.bequeath(desk.me.node_id, old.discovery_tag) is None
    taken = ours.take(laptop.me.node_id, theirs.tell(desk.me.node_id, old.discovery_tag))
    assert taken.verdict is Verdict.MOVED_ON
    new = desk.namespace()
    assert new != old
    stranger = Home(tmp_path, "stranger").me.node_id
    assert ours.tell(stranger, old.discovery_tag).secret == b""
    assert ours.tell(laptop.me.node_id, new.discovery_tag).secret == b"", "it has it already"
    told = ours.tell(laptop.me.node_id, old.discovery_tag)
    assert told.secret == new.secret
    assert ours.bequeath(laptop.me.node_id, old.discovery_tag) == Told(secret=new.secret)
    theirs.take(desk.me.node_id, Told(told.roster, b"x" * 32))
    assert laptop.namespace() == old, "not the secret that the roster speaks of"
    theirs.take(desk.me.node_id, told)
    assert laptop.namespace() == new
    assert theirs.security.is_current(new.discovery_tag)


def test_the_same_roster_from_several_members_makes_a_newcomer_count(
    desk: Home, laptop: Home, tmp_path: Path
) -> None:
    """Whom most of those who count tell of; nothing has to be sent for that."""
    nas, tablet = Home(tmp_path, "nas"), Home(tmp_path, "tablet")
    pair(desk, laptop)
    pair(desk, nas)
    laptop.join_records_of(desk)
    pair(desk, tablet)
    for home in (laptop, nas):
        home.join_records_of(desk)
    members = members_of(nas)
    assert members.roster is not None
    assert tablet.me.node_id not in members.roster.counted
    members.met(laptop.me.node_id)
    assert tablet.me.node_id in members.roster.counted
    assert tablet.me.node_id in nas.circle().roster.counted


def test_a_namespace_is_in_use_once_another_machine_was_met(desk: Home, laptop: Home) -> None:
    """Pairing does not replace it silently any more; our own processes do not count."""
    members = members_of(desk)
    members.met(desk.me.node_id)
    assert desk.namespace().is_unused
    members.met(laptop.me.node_id)
    assert not desk.namespace().is_unused


# --- machines ---


def test_our_own_key_on_another_machine_is_refused(desk: Home) -> None:
    """Before anything else is looked at."""
    members = members_of(desk)
    mine, tag = members.introduction(), desk.namespace().discovery_tag
    assert members.judge_hello(members.me, mine, tag) == Granted()
    assert members.judge_hello(members.me, Introduction(b"d" * 32), tag) == Exchange()
    clone = Introduction(mine.roster, machine="0" * 32, boot=mine.boot)
    refused = members.judge_hello(members.me, clone, tag)
    assert isinstance(refused, Refused)
    assert "is used on two machines" in refused.sentence
