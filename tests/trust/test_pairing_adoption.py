"""What becomes of an offer: refused if it does not fit, asked about if it costs, else stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from potluck.identity.namespace import InvalidNamespaceName, NamespaceExists, NetworkNamespace
from potluck.identity.private_files import DamagedFile
from potluck.trust import membership_store
from potluck.trust.membership_store import VERIFIER, NamespaceMembership
from potluck.trust.pairing import NamespaceImporter, PairingFailed, StoragePlan
from potluck.trust.pairing_protocol import Namespace, Offered, Paired
from potluck.trust.roster import Roster
from potluck.trust.roster_records import commitment_to
from support.homes import Home


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POTLUCK_NAMESPACE", raising=False)


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """The machine that offers."""
    return Home(tmp_path, "desk")


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    """The machine to which it is offered."""
    return Home(tmp_path, "laptop")


def offer(membership: NamespaceMembership) -> Offered:
    """What the guest is shown."""
    return Offered(membership.me.card, membership.offer())


def admitted(membership: NamespaceMembership, guest: Home) -> Paired:
    """What the guest gets when the host has written it down."""
    after = membership.admit(guest.me.card)
    return Paired(membership.me.card, after.offer(), "Done.")


def join(
    guest: Home, membership: NamespaceMembership, name: str | None = None, *, keep: bool = False
) -> StoragePlan:
    """Accept an offer and store it."""
    adopter = NamespaceImporter(guest.path, guest.me, name)
    plan = adopter.plan(offer(membership), keep=keep)
    adopter.store(plan, admitted(membership, guest))
    return plan


def revoke(by: Home, target: Home) -> NamespaceMembership:
    """Take a machine out; of two, one decides alone."""
    return by.membership().propose(
        lambda roster, secret: roster.revoke(target.me.node_id, by.me, secret)
    )


def stored(home: Home) -> list[str]:
    """The namespaces kept on a machine."""
    return NetworkNamespace.stored(home=home.path)


# --- the silent cases ---


def test_a_machine_without_anything_joins_without_a_question(desk: Home, laptop: Home) -> None:
    """Secret and roster are stored, and in use."""
    plan = join(laptop, desk.membership())
    assert plan.question is None
    assert laptop.namespace() == desk.namespace()
    assert laptop.members() == desk.members() == ["desk", "laptop"]
    assert not laptop.namespace().is_unused


@pytest.mark.parametrize("name", ["home", "lab"])
def test_an_unused_namespace_gives_way_whatever_its_name(
    desk: Home, laptop: Home, name: str
) -> None:
    """Nothing is left of it, so that it is clear which one is used."""
    laptop.membership(name)
    plan = join(laptop, desk.membership())
    assert plan.question is None
    assert stored(laptop) == ["home"]
    assert laptop.namespace() == desk.namespace()


def test_an_unused_namespace_that_somebody_joined_meanwhile_stays(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """Between the plan and its end a person may have paired here too."""
    membership = laptop.membership("lab")
    adopter = NamespaceImporter(laptop.path, laptop.me)
    plan = adopter.plan(offer(desk.membership()))
    membership.admit(Home(tmp_path, "nas").me.card)
    adopter.store(plan, admitted(desk.membership(), laptop))
    assert stored(laptop) == ["home", "lab"]


def test_the_same_if_both_have_one_name(tmp_path: Path, desk: Home, laptop: Home) -> None:
    """Then the newcomer cannot be stored, and says so; the group with company is safe."""
    membership = laptop.membership()
    adopter = NamespaceImporter(laptop.path, laptop.me)
    plan = adopter.plan(offer(desk.membership()))
    membership.admit(Home(tmp_path, "nas").me.card)
    with pytest.raises(NamespaceExists):
        adopter.store(plan, admitted(desk.membership(), laptop))
    assert laptop.members() == ["laptop", "nas"]


def test_pairing_again_changes_nothing_but_the_roster(desk: Home, laptop: Home) -> None:
    """No question; whom this machine counted before it still counts, and whom it has met."""
    join(laptop, desk.membership())
    before = laptop.membership()
    plan = join(laptop, desk.membership())
    assert plan.question is None
    assert "already" in plan.reason
    after = laptop.membership()
    assert after.namespace == before.namespace
    assert after.roster.counted == {desk.me.node_id, laptop.me.node_id}


def test_pairing_again_brings_the_new_secret(tmp_path: Path, desk: Home, laptop: Home) -> None:
    """What this machine alone knew of the group is not forgotten on the way."""
    join(laptop, desk.membership())
    alone = laptop.membership().roster.admit(Home(tmp_path, "nas").me.card, laptop.me)
    membership_store.write_roster(laptop.namespace(), alone)
    old = desk.namespace()
    rotated = revoke(desk, laptop)
    assert rotated.roster.generation.number == 1
    plan = join(laptop, rotated)
    assert "new secret" in plan.reason
    assert laptop.namespace() == desk.namespace() != old
    assert laptop.namespace().previous == (old.secret,)
    names = {card.name for card in laptop.membership().roster.history.records.cards().values()}
    assert names == {"desk", "laptop", "nas"}
    assert laptop.members() == ["desk", "laptop"]


def test_a_group_is_recognised_under_any_name(desk: Home, laptop: Home) -> None:
    """This machine may call it differently."""
    join(laptop, desk.membership(), "attic")
    assert stored(laptop) == ["attic"]
    plan = join(laptop, desk.membership())
    assert plan.name == "attic"
    assert stored(laptop) == ["attic"]


# --- the questions ---


def test_leaving_company_is_asked(tmp_path: Path, desk: Home, laptop: Home) -> None:
    """With yes the old namespace is gone, also when both have the same name."""
    laptop.membership().admit(Home(tmp_path, "nas").me.card)
    plan = join(laptop, desk.membership())
    assert plan.question == 'This machine is in "home" with one other machine. Join "home" instead?'
    assert laptop.namespace() == desk.namespace()
    assert stored(laptop) == ["home"]


def test_keeping_both_needs_no_question(tmp_path: Path, desk: Home, laptop: Home) -> None:
    """The newcomer gets a name of its own if its own is taken; a third one another."""
    laptop.membership().admit(Home(tmp_path, "nas").me.card)
    mine = laptop.namespace()
    plan = join(laptop, desk.membership(), keep=True)
    assert (plan.question, plan.name, plan.gives_way) == (None, "home-2", None)
    assert laptop.namespace() == mine
    assert laptop.namespace("home-2") == desk.namespace()
    tower = Home(tmp_path, "tower")
    assert join(laptop, tower.membership(), keep=True).name == "home-3"
    assert join(laptop, tower.membership("lab"), keep=True).name == "lab"


def test_in_several_already_it_asks_whether_to_add_one(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """Nothing is left then; with keep it is not even asked."""
    for name in ("attic", "barn"):
        laptop.membership(name).admit(Home(tmp_path, "nas").me.card)
    adopter = NamespaceImporter(laptop.path, laptop.me)
    assert adopter.may_ask
    plan = adopter.plan(offer(desk.membership()))
    assert plan.question == 'This machine is in "attic" and "barn". Join "home" too?'
    assert plan.gives_way is None
    assert join(laptop, desk.membership(), keep=True).question is None
    assert stored(laptop) == ["attic", "barn", "home"]


def test_whether_it_may_ask_is_known_beforehand(tmp_path: Path, laptop: Home) -> None:
    """So that a code is not used up where nobody can answer."""
    adopter = NamespaceImporter(laptop.path, laptop.me)
    assert not adopter.may_ask
    membership = laptop.membership()
    assert not adopter.may_ask
    membership.admit(Home(tmp_path, "nas").me.card)
    assert adopter.may_ask
    assert NamespaceImporter(laptop.path, laptop.me, "lab").may_ask
    (membership.namespace.directory / "secret").write_bytes(b"half")
    with pytest.raises(DamagedFile):
        _ = adopter.may_ask


def test_a_name_that_is_taken_is_refused_before_anything_is_accepted(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """Only a name that was wished for is refused; another would get a number."""
    laptop.membership("lab").admit(Home(tmp_path, "nas").me.card)
    adopter = NamespaceImporter(laptop.path, laptop.me, "lab")
    assert adopter.plan(offer(desk.membership())).gives_way == "lab"
    with pytest.raises(NamespaceExists, match="--namespace"):
        adopter.plan(offer(desk.membership()), keep=True)


# --- what is refused ---


def tampered(offered: Offered, **changes: object) -> Offered:
    """An offer that does not fit together."""
    return replace(offered, namespace=replace(offered.namespace, **changes))  # type: ignore[arg-type]


def test_an_offer_that_does_not_fit_together_is_refused(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """Another secret, no roster, the roster of others, a name that could be no directory."""
    good = offer(desk.membership())
    other = Home(tmp_path, "tower").membership()
    adopter = NamespaceImporter(laptop.path, laptop.me)
    for bad, words in (
        (tampered(good, secret=bytes(32)), "does not match its offer"),
        (tampered(good, roster=b"nonsense"), "invalid"),
        (tampered(good, roster=other.roster.to_bytes()), "does not match its offer"),
        (replace(good, peer=other.me.card), "does not match its offer"),
    ):
        with pytest.raises(PairingFailed, match=words):
            adopter.plan(bad)
    for name in ("my lab", "insecure", "x" * 40):
        with pytest.raises(InvalidNamespaceName):
            adopter.plan(tampered(good, name=name))
    assert stored(laptop) == []


def test_a_roster_without_us_is_refused_in_the_end(desk: Home, laptop: Home) -> None:
    """Then nothing is stored."""
    adopter = NamespaceImporter(laptop.path, laptop.me)
    membership = desk.membership()
    plan = adopter.plan(offer(membership))
    with pytest.raises(PairingFailed, match="without this machine"):
        adopter.store(plan, Paired(desk.me.card, membership.offer(), "Done."))
    assert stored(laptop) == []


def test_an_older_secret_is_no_reason_to_go_back(desk: Home, laptop: Home) -> None:
    """The host missed a rotation: it has to type the code, not to show it."""
    join(laptop, desk.membership())
    old = desk.membership()
    revoke(laptop, desk)
    with pytest.raises(PairingFailed, match=r"older secret of .*type the code there"):
        NamespaceImporter(laptop.path, laptop.me).plan(offer(old))


def test_the_other_side_of_a_split_is_joined_only_after_a_question(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """Each revoked the other, so each has a secret of its own."""
    join(laptop, desk.membership())
    nas = Home(tmp_path, "nas")
    revoke(desk, laptop)
    revoke(laptop, desk)
    desk.membership().admit(nas.me.card)
    plan = join(laptop, desk.membership())
    assert plan.question is not None
    assert '"desk" accepted another change of the secret of "home"' in plan.question
    assert laptop.namespace() == desk.namespace()
    assert laptop.members() == ["desk", "laptop", "nas"]


def test_what_is_stored_survives_a_roster_that_vanished(desk: Home, laptop: Home) -> None:
    """The group was known when the plan was made, and its file is gone when it is carried out."""
    join(laptop, desk.membership())
    adopter = NamespaceImporter(laptop.path, laptop.me)
    plan = adopter.plan(offer(desk.membership()))
    laptop.namespace().roster_path.unlink()
    adopter.store(plan, admitted(desk.membership(), laptop))
    assert laptop.members() == ["desk", "laptop"]


def test_an_offer_is_judged_by_its_own_roster(desk: Home) -> None:
    """The secret must be the one of the roster's present generation."""
    membership = desk.membership()
    roster = Roster.from_bytes(membership.offer().roster, VERIFIER)
    assert roster.generation.commitment == commitment_to(membership.offer().secret)
    assert isinstance(membership.offer(), Namespace)
