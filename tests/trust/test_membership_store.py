"""A group on the disk: private, changed under a lock, and never without its secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from potluck.errors import DistributedError, HandshakeRefused, UnsupportedOperation
from potluck.identity.namespace import NetworkNamespace, SecurityWarning, UnknownNamespace
from potluck.identity.node import NodeIdentity
from potluck.identity.private_files import DamagedFile, UnsafeFile
from potluck.net.secure_socket import Security
from potluck.trust import membership_store
from potluck.trust.admission import AdmissionRefused, Granted, RosterExchange, digest
from potluck.trust.membership_store import (
    VERIFIER,
    MembershipChanged,
    NamespaceMembership,
    TrustStore,
    signer_of,
)
from potluck.trust.roster import MergeOutcome, Roster
from potluck.trust.roster_records import RosterRefused, commitment_to
from potluck.wire_messages import Introduction, Told
from support.group_machines import members_of
from support.homes import Home, pair
from support.threads import together

PASSPHRASE = "unruly copper migrant walnut tracing spoof"  # noqa: S105  an example


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """A machine."""
    return Home(tmp_path, "desk")


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    """Another one."""
    return Home(tmp_path, "laptop")


# --- who we are ---


def test_a_machine_is_called_what_its_host_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the domain; where the host's name says nothing, by the name made from its id."""
    identity = NodeIdentity.ephemeral()
    for host, name in (
        ("desk.example.org", "desk"),
        ("localhost", identity.short_name),
        ("", identity.short_name),
    ):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert signer_of(identity).card.name == name
    assert signer_of(identity, "Anna's \x1b[1mdesk").card.name == "Anna's [1mdesk"


def test_signatures_are_good_for_this_purpose_alone() -> None:
    """What a node key signed for anything else is no vote and no admission."""
    identity = NodeIdentity.ephemeral()
    me = signer_of(identity, "desk")
    assert VERIFIER.owns(me.card, me.sign(b"yes"), b"yes")
    assert not VERIFIER.owns(me.card, identity.sign(b"yes"), b"yes")
    assert not VERIFIER.owns(me.card, me.sign(b"yes"), b"no")


# --- founding and reading ---


def test_a_group_is_founded_once(desk: Home) -> None:
    """Its founder is its first member, and the roster fits the secret."""
    membership = desk.membership()
    assert desk.members() == ["desk"]
    assert membership.has_secret
    assert membership.roster.group_id == desk.membership().roster.group_id
    assert membership.namespace.is_unused


def test_processes_that_found_at_once_found_one_group(desk: Home) -> None:
    """Whoever comes second finds the first one's."""
    desk.namespace()
    founded = together(*[desk.membership] * 8)
    assert len({membership.roster.group_id for membership in founded}) == 1


def test_the_roster_is_private(desk: Home) -> None:
    """Its file has mode 0600, and one that others may read is refused with the fix."""
    path = desk.membership().namespace.roster_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(UnsafeFile, match="chmod 600"):
        desk.membership()


def test_looking_changes_nothing(desk: Home) -> None:
    """Where no group was founded it is shown as it would be, and not written."""
    membership = NamespaceMembership.as_it_is(desk.namespace(), desk.me)
    assert [member.name for member in membership.roster.members] == ["desk"]
    assert not membership.namespace.roster_path.exists()
    founded = desk.membership()
    assert (
        NamespaceMembership.as_it_is(desk.namespace(), desk.me).roster.group_id
        == founded.roster.group_id
    )


@pytest.mark.parametrize("damage", [b"", b"nonsense", bytes(2 << 20)])
def test_a_damaged_roster_is_told_with_the_way_out(desk: Home, damage: bytes) -> None:
    """Empty, not ours, or far too long."""
    path = desk.membership().namespace.roster_path
    path.write_bytes(damage)
    with pytest.raises(DamagedFile, match=r"roster is damaged.*potluck unpair home"):
        desk.membership()


def test_a_namespace_without_a_secret_of_its_own_has_no_group(desk: Home) -> None:
    """Whoever wants is in it."""
    with pytest.warns(SecurityWarning):
        namespace = NetworkNamespace.open()
    with pytest.raises(UnsupportedOperation, match="has no member list"):
        NamespaceMembership.of(namespace, desk.me)


def test_a_passphrase_has_no_roster(desk: Home) -> None:
    """The error says how somebody is kept out instead."""
    namespace = NetworkNamespace.from_passphrase("lab", PASSPHRASE, home=desk.path)
    namespace.save()
    for kept in (namespace, NetworkNamespace.load("lab", home=desk.path)):
        with pytest.raises(
            UnsupportedOperation, match=r"every machine with.*choose another passphrase"
        ):
            NamespaceMembership.of(kept, desk.me)


# --- admitting ---


def test_admitting_writes_the_newcomer_down(desk: Home, laptop: Home) -> None:
    """From then on the namespace is in use, and what others receive has the newcomer on it."""
    membership = desk.membership()
    told = Roster.from_bytes(membership.enrolled(laptop.me.card), VERIFIER)
    assert told.is_member(laptop.me.node_id)
    assert desk.members() == ["desk"]
    membership.admit(laptop.me.card)
    assert desk.members() == ["desk", "laptop"]
    assert not desk.namespace().is_unused


def test_nobody_is_lost_when_two_are_admitted_at_once(tmp_path: Path, desk: Home) -> None:
    """Each process adds to what is on the disk, not to what it read when it began."""
    first, second = desk.membership(), desk.membership()
    first.admit(Home(tmp_path, "laptop").me.card)
    second.admit(Home(tmp_path, "nas").me.card)
    assert desk.members() == ["desk", "laptop", "nas"]


def test_a_group_that_was_replaced_meanwhile_admits_nobody(desk: Home, laptop: Home) -> None:
    """The secret that was handed out is not the one this machine has now."""
    membership = desk.membership()
    desk.namespace().delete()
    with pytest.raises(UnknownNamespace):
        membership.admit(laptop.me.card)
    desk.membership()
    with pytest.raises(MembershipChanged, match="Try again"):
        membership.admit(laptop.me.card)
    desk.namespace().roster_path.unlink()
    with pytest.raises(MembershipChanged, match="replaced"):
        membership.admit(laptop.me.card)
    assert desk.members() == ["desk"]


# --- new secrets ---


def rotate(membership: NamespaceMembership) -> NamespaceMembership:
    """Propose a new secret."""
    return membership.propose(lambda roster, secret: roster.rotate(membership.me, secret))


def test_a_machine_alone_changes_its_secret_at_once(desk: Home) -> None:
    """The old one becomes a previous one, and nothing is left waiting."""
    before = desk.membership()
    after = rotate(before)
    assert after.has_secret
    assert not after.namespace.has_secret(before.namespace.secret)
    assert after.namespace.previous == (before.namespace.secret,)
    assert desk.namespace() == after.namespace
    assert (after.namespace.directory / "proposed").read_bytes() == b""


def test_of_two_machines_one_revokes_the_other_alone(desk: Home, laptop: Home) -> None:
    """The other one is out, and keeps only the old secret."""
    membership = desk.membership().admit(laptop.me.card)
    after = membership.propose(
        lambda roster, secret: roster.revoke(laptop.me.node_id, desk.me, secret)
    )
    assert [member.name for member in after.roster.members] == ["desk"]
    assert after.has_secret
    assert desk.namespace().previous == (membership.namespace.secret,)


def test_a_proposal_that_needs_others_waits_with_its_secret(desk: Home, laptop: Home) -> None:
    """The secret in force does not change; the new one is kept, private, for the day it does."""
    membership = desk.membership().admit(laptop.me.card)
    after = rotate(membership)
    assert after.namespace == membership.namespace
    assert after.has_secret
    (pending,) = after.roster.pending
    assert "one more signature" in pending.reason
    kept = after.namespace.directory / "proposed"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert commitment_to(kept.read_bytes()) == pending.rotation.commitment
    again = rotate(after)  # nobody else has signed, so it may be replaced
    assert len(again.roster.pending) == 1
    assert len(kept.read_bytes()) == 64


def test_a_proposal_that_was_accepted_takes_effect_when_it_is_next_looked_at(
    desk: Home, laptop: Home
) -> None:
    """Whether another member signed it, or a crash came between the roster and the secret."""
    membership = rotate(desk.membership().admit(laptop.me.card))
    (pending,) = membership.roster.pending
    signed = Roster.from_bytes(membership.roster.to_bytes(), VERIFIER).sign(pending.name, laptop.me)
    membership_store.write_roster(membership.namespace, signed)
    after = desk.membership()
    assert after.has_secret
    assert after.namespace.previous == (membership.namespace.secret,)
    assert (after.namespace.directory / "proposed").read_bytes() == b""


def test_who_lacks_the_present_secret_offers_nothing(desk: Home, laptop: Home) -> None:
    """The record of a new secret arrived without the secret: neither pairing nor proposing."""
    membership = desk.membership().admit(laptop.me.card)
    adopted = Roster.from_bytes(membership.roster.to_bytes(), VERIFIER).adopted()
    changed = adopted.rotate(laptop.me, commitment_to(b"x" * 32))
    (pending,) = changed.pending
    membership_store.write_roster(membership.namespace, changed.sign(pending.name, desk.me))
    now = desk.membership()
    assert not now.has_secret
    with pytest.raises(MembershipChanged, match="new secret that this machine does not have"):
        now.offer()
    with pytest.raises(MembershipChanged):
        rotate(now)


# --- what other machines tell ---


def copy_of(membership: NamespaceMembership) -> Roster:
    """A roster as others receive it."""
    return Roster.from_bytes(membership.roster.to_bytes(), VERIFIER)


def test_a_signature_from_elsewhere_puts_our_proposal_in_force(desk: Home, laptop: Home) -> None:
    """The new secret was kept for that; the other machine is handed it, and checks it."""
    pair(desk, laptop)
    proposed = rotate(desk.membership())
    theirs, taken = laptop.membership().take(copy_of(proposed), desk.me.node_id)
    assert taken.outcome is MergeOutcome.CURRENT
    (pending,) = theirs.roster.pending
    signed = theirs.sign(pending.name)
    assert signed.roster.generation.number == 1
    assert not signed.has_secret
    ours, taken = desk.membership().take(copy_of(signed), laptop.me.node_id)
    assert taken.outcome is MergeOutcome.MOVED_ON
    assert ours.has_secret
    with pytest.raises(RosterRefused, match="not the one in the member list"):
        laptop.membership().store_secret(b"x" * 32)
    heir = laptop.membership().store_secret(ours.namespace.secret)
    assert heir.has_secret
    assert heir.namespace == laptop.namespace() == desk.namespace()
    assert heir.store_secret(ours.namespace.secret).namespace == heir.namespace


def test_what_a_stranger_tells_is_not_written(desk: Home, laptop: Home) -> None:
    """The roster of another group changes nothing on the disk."""
    before = desk.membership().namespace.roster_path.read_bytes()
    after, taken = desk.membership().take(copy_of(laptop.membership()), laptop.me.node_id)
    assert taken.outcome is MergeOutcome.REFUSED
    assert after.namespace.roster_path.read_bytes() == before


def test_whom_we_brought_in_during_a_change_is_brought_in_again(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """The desk proposed before it heard of the tablet, which the laptop had let in."""
    pair(desk, laptop)
    tablet = Home(tmp_path, "tablet")
    proposed = rotate(desk.membership())
    laptop.membership().take(copy_of(proposed), desk.me.node_id)
    pair(laptop, tablet)
    (pending,) = laptop.membership().roster.pending
    signed = laptop.membership().sign(pending.name)
    assert signed.roster.is_member(tablet.me.node_id)
    ours, _ = desk.membership().take(copy_of(signed), laptop.me.node_id)
    assert ours.roster.is_member(tablet.me.node_id)


def test_who_is_no_member_any_more_offers_nothing(desk: Home, laptop: Home) -> None:
    """The sentence says why."""
    membership = desk.membership().admit(laptop.me.card)
    theirs = NamespaceMembership(membership.namespace, membership.roster, laptop.me)
    revoked = membership.roster.revoke(laptop.me.node_id, desk.me, commitment_to(bytes(32)))
    out = NamespaceMembership(theirs.namespace, revoked, laptop.me)
    with pytest.raises(RosterRefused, match="laptop was revoked by desk"):
        out.offer()


def test_a_damaged_proposal_is_told(desk: Home) -> None:
    """It can be deleted without harm."""
    membership = desk.membership()
    rotate(membership)
    (membership.namespace.directory / "proposed").write_bytes(b"half a secret")
    with pytest.raises(DistributedError, match="propose the change again"):
        rotate(desk.membership())


def test_what_stands_in_the_way_of_another_group(desk: Home, laptop: Home) -> None:
    """The summary by which joining another one is decided."""
    membership = desk.membership()
    assert membership.belonging.unused
    assert membership.belonging.others == 0
    membership = membership.admit(laptop.me.card)
    assert not membership.belonging.unused
    assert membership.belonging.others == 1
    assert membership.belonging.group_id == membership.roster.group_id


# --------------------------------------------------------------------------------------------------
# Who may connect to this process: what is on the disk counts, whoever put it there.


def told_by(members: TrustStore) -> Introduction:
    """What its hello says about its roster, and nothing of its machine."""
    return Introduction(members.introduction().roster)


# --- which namespaces have a roster ---


def test_a_namespace_that_is_kept_here_has_a_roster(desk: Home) -> None:
    """It is founded on first use."""
    members = members_of(desk)
    assert members.roster is not None
    assert [member.name for member in members.roster.members] != []
    assert members.introduction().roster == digest(desk.membership().roster)


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
        members = TrustStore(Security(namespace, NodeIdentity.ephemeral()))
        tag = namespace.discovery_tag
        assert members.roster is None
        assert members.introduction().roster == b""
        assert members.judge_hello(stranger, Introduction(b"d" * 32), tag) == Granted()
        assert members.judge_peer(stranger) is None
        assert members.tell(stranger, tag) == Told()
        assert members.secret_for(stranger, tag) is None
        with pytest.raises(HandshakeRefused, match="this machine does not"):
            members.take(stranger, Told())
        members.met(stranger)
        members.store_secret(bytes(32))
        assert members.security.namespace is namespace


# --- the disk ---


def test_what_is_damaged_is_told_at_once(desk: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when somebody calls."""
    monkeypatch.setenv("POTLUCK_HOME", str(desk.path))
    assert TrustStore.load().roster == desk.membership().roster
    desk.namespace().roster_path.write_bytes(b"damaged")
    with pytest.raises(DamagedFile, match="potluck unpair home"):
        TrustStore.load()


def test_a_machine_that_is_not_on_its_own_roster_is_told_at_once(
    desk: Home, laptop: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key was deleted, or its files were copied: nobody would let it in."""
    pair(desk, laptop)
    monkeypatch.setenv("POTLUCK_HOME", str(laptop.path))
    (laptop.path / "node_keypair").unlink()
    with pytest.raises(RosterRefused, match=r'not a member of "home".*key was replaced.*Pair it'):
        TrustStore.load()


def test_what_another_process_of_this_machine_changes_is_noticed(desk: Home, laptop: Home) -> None:
    """A command pairs a machine, or changes the secret, while this process runs."""
    members = members_of(desk)
    tag = members.security.namespace.discovery_tag
    assert isinstance(members.judge_peer(laptop.me.node_id), AdmissionRefused)
    pair(desk, laptop)
    assert members.judge_peer(laptop.me.node_id) is None
    desk.membership().propose(
        lambda roster, secret: roster.revoke(laptop.me.node_id, desk.me, secret)
    )
    assert isinstance(members.judge_peer(laptop.me.node_id), AdmissionRefused)
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
    desk.membership().propose(lambda roster, secret: roster.rotate(desk.me, secret))
    taken = theirs.take(desk.me.node_id, ours.tell(laptop.me.node_id, old.discovery_tag))
    assert taken.outcome is MergeOutcome.CURRENT
    (pending,) = taken.roster.pending
    laptop.membership().sign(pending.name)
    assert theirs.tell(desk.me.node_id, old.discovery_tag).secret == b"", "it has none to give"
    assert theirs.secret_for(desk.me.node_id, old.discovery_tag) is None
    taken = ours.take(laptop.me.node_id, theirs.tell(desk.me.node_id, old.discovery_tag))
    assert taken.outcome is MergeOutcome.MOVED_ON
    new = desk.namespace()
    assert new != old
    stranger = Home(tmp_path, "stranger").me.node_id
    assert ours.tell(stranger, old.discovery_tag).secret == b""
    assert ours.tell(laptop.me.node_id, new.discovery_tag).secret == b"", "it has it already"
    told = ours.tell(laptop.me.node_id, old.discovery_tag)
    assert told.secret == new.secret
    assert ours.secret_for(laptop.me.node_id, old.discovery_tag) == Told(secret=new.secret)
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
    assert tablet.me.node_id in nas.membership().roster.counted


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
    assert members.judge_hello(members.me, Introduction(b"d" * 32), tag) == RosterExchange()
    clone = Introduction(mine.roster, machine="0" * 32, boot=mine.boot)
    refused = members.judge_hello(members.me, clone, tag)
    assert isinstance(refused, AdmissionRefused)
    assert "is used on two machines" in refused.sentence
