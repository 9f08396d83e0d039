"""What becomes of an offer: refused if it does not fit, asked about if it costs, else stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from potluck.identity.namespace import InvalidNamespaceName, NamespaceExists, NetworkNamespace
from potluck.identity.private_files import DamagedFile
from potluck.trust import membership_store
from potluck.trust.membership_store import VERIFIER, Circle
from potluck.trust.pairing import Adopter, PairingFailed, Plan
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


def offer(circle: Circle) -> Offered:
    """What the guest is shown."""
    return Offered(circle.me.card, circle.offer())


def admitted(circle: Circle, guest: Home) -> Paired:
    """What the guest gets when the host has written it down."""
    after = circle.admit(guest.me.card)
    return Paired(circle.me.card, after.offer(), "Done.")


def join(guest: Home, circle: Circle, name: str | None = None, *, keep: bool = False) -> Plan:
    """Accept an offer and store it."""
    adopter = Adopter(guest.path, guest.me, name)
    plan = adopter.plan(offer(circle), keep=keep)
    adopter.store(plan, admitted(circle, guest))
    return plan


def revoke(by: Home, target: Home) -> Circle:
    """Take a machine out; of two, one decides alone."""
    return by.circle().propose(
        lambda roster, secret: roster.revoke(target.me.node_id, by.me, secret)
    )


def stored(home: Home) -> list[str]:
    """The namespaces kept on a machine."""
    return NetworkNamespace.stored(home=home.path)


# --- the silent cases ---


def test_a_machine_without_anything_joins_without_a_question(desk: Home, laptop: Home) -> None:
    """Secret and roster are stored, and in use."""
    plan = join(laptop, desk.circle())
    assert plan.question is None
    assert laptop.namespace() == desk.namespace()
    assert laptop.members() == desk.members() == ["desk", "laptop"]
    assert not laptop.namespace().is_unused


@pytest.mark.parametrize("name", ["home", "lab"])
def test_an_unused_namespace_gives_way_whatever_its_name(
    desk: Home, laptop: Home, name: str
) -> None:
    """Nothing is left of it, so that it is clear which one is used."""
    laptop.circle(name)
    plan = join(laptop, desk.circle())
    assert plan.question is None
    assert stored(laptop) == ["home"]
    assert laptop.namespace() == desk.namespace()


def test_an_unused_namespace_that_somebody_joined_meanwhile_stays(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """Between the plan and its end a person may have paired here too."""
    circle = laptop.circle("lab")
    adopter = Adopter(laptop.path, laptop.me)
    plan = adopter.plan(offer(desk.circle()))
    circle.admit(Home(tmp_path, "nas").me.card)
    adopter.store(plan, admitted(desk.circle(), laptop))
    assert stored(laptop) == ["home", "lab"]


def test_the_same_if_both_have_one_name(tmp_path: Path, desk: Home, laptop: Home) -> None:
    """Then the newcomer cannot be stored, and says so; the circle with company is safe."""
    circle = laptop.circle()
    adopter = Adopter(laptop.path, laptop.me)
    plan = adopter.plan(offer(desk.circle()))
    circle.admit(Home(tmp_path, "nas").me.card)
    with pytest.raises(NamespaceExists):
        adopter.store(plan, admitted(desk.circle(), laptop))
    assert laptop.members() == ["laptop", "nas"]


def test_pairing_again_changes_nothing_but_the_roster(desk: Home, laptop: Home) -> None:
    """No question; whom this machine counted before it still counts, and whom it has met."""
    join(laptop, desk.circle())
    before = laptop.circle()
    plan = join(laptop, desk.circle())
    assert plan.question is None
    assert "already" in plan.reason
    after = laptop.circle()
    assert after.namespace == before.namespace
    assert after.roster.counted == {desk.me.node_id, laptop.me.node_id}


def test_pairing_again_brings_the_new_secret(tmp_path: Path, desk: Home, laptop: Home) -> None:
    """What this machine alone knew of the circle is not forgotten on the way."""
    join(laptop, desk.circle())
    alone = laptop.circle().roster.admit(Home(tmp_path, "nas").me.card, laptop.me)
    membership_store.write_roster(laptop.namespace(), alone)
    old = desk.namespace()
    rotated = revoke(desk, laptop)
    assert rotated.roster.generation.number == 1
    plan = join(laptop, rotated)
    assert "new secret" in plan.reason
    assert laptop.namespace() == desk.namespace() != old
    assert laptop.namespace().previous == (old.secret,)
    names = {card.name for card in laptop.circle().roster.history.records.cards().values()}
    assert names == {"desk", "laptop", "nas"}
    assert laptop.members() == ["desk", "laptop"]


def test_a_circle_is_recognised_under_any_name(desk: Home, laptop: Home) -> None:
    """This machine may call it differently."""
    join(laptop, desk.circle(), "attic")
    assert stored(laptop) == ["attic"]
    plan = join(laptop, desk.circle())
    assert plan.name == "attic"
    assert stored(laptop) == ["attic"]


# --- the questions ---


def test_leaving_company_is_asked(tmp_path: Path, desk: Home, laptop: Home) -> None:
    """With yes the old namespace is gone, also when both have the same name."""
    laptop.circle().admit(Home(tmp_path, "nas").me.card)
    plan = join(laptop, desk.circle())
    assert plan.question == 'This machine is in "home" with one other machine. Join "home" instead?'
    assert laptop.namespace() == desk.namespace()
    assert stored(laptop) == ["home"]


def test_keeping_both_needs_no_question(tmp_path: Path, desk: Home, laptop: Home) -> None:
    """The newcomer gets a name of its own if its own is taken; a third one another."""
    laptop.circle().admit(Home(tmp_path, "nas").me.card)
    mine = laptop.namespace()
    plan = join(laptop, desk.circle(), keep=True)
    assert (plan.question, plan.name, plan.gives_way) == (None, "home-2", None)
    assert laptop.namespace() == mine
    assert laptop.namespace("home-2") == desk.namespace()
    tower = Home(tmp_path, "tower")
    assert join(laptop, tower.circle(), keep=True).name == "home-3"
    assert join(laptop, tower.circle("lab"), keep=True).name == "lab"


def test_in_several_already_it_asks_whether_to_add_one(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """Nothing is left then; with keep it is not even asked."""
    for name in ("attic", "barn"):
        laptop.circle(name).admit(Home(tmp_path, "nas").me.card)
    adopter = Adopter(laptop.path, laptop.me)
    assert adopter.may_ask
    plan = adopter.plan(offer(desk.circle()))
    assert plan.question == 'This machine is in "attic" and "barn". Join "home" too?'
    assert plan.gives_way is None
    assert join(laptop, desk.circle(), keep=True).question is None
    assert stored(laptop) == ["attic", "barn", "home"]


def test_whether_it_may_ask_is_known_beforehand(tmp_path: Path, laptop: Home) -> None:
    """So that a code is not used up where nobody can answer."""
    adopter = Adopter(laptop.path, laptop.me)
    assert not adopter.may_ask
    circle = laptop.circle()
    assert not adopter.may_ask
    circle.admit(Home(tmp_path, "nas").me.card)
    assert adopter.may_ask
    assert Adopter(laptop.path, laptop.me, "lab").may_ask
    (circle.namespace.directory / "secret").write_bytes(b"half")
    with pytest.raises(DamagedFile):
        _ = adopter.may_ask


def test_a_name_that_is_taken_is_refused_before_anything_is_accepted(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """Only a name that was wished for is refused; another would get a number."""
    laptop.circle("lab").admit(Home(tmp_path, "nas").me.card)
    adopter = Adopter(laptop.path, laptop.me, "lab")
    assert adopter.plan(offer(desk.circle())).gives_way == "lab"
    with pytest.raises(NamespaceExists, match="--namespace"):
        adopter.plan(offer(desk.circle()), keep=True)


# --- what is refused ---


def tampered(offered: Offered, **changes: object) -> Offered:
    """An offer that does not fit together."""
    return replace(offered, namespace=replace(offered.namespace, **changes))  # type: ignore[arg-type]


def test_an_offer_that_does_not_fit_together_is_refused(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """Another secret, no roster, the roster of others, a name that could be no directory."""
    good = offer(desk.circle())
    other = Home(tmp_path, "tower").circle()
    adopter = Adopter(laptop.path, laptop.me)
    for bad, words in (
        (tampered(good, secret=bytes(32)), "does not fit what it offers"),
        (tampered(good, roster=b"nonsense"), "not valid"),
        (tampered(good, roster=other.roster.to_bytes()), "does not fit what it offers"),
        (replace(good, peer=other.me.card), "does not fit what it offers"),
    ):
        with pytest.raises(PairingFailed, match=words):
            adopter.plan(bad)
    for name in ("my lab", "insecure", "x" * 40):
        with pytest.raises(InvalidNamespaceName):
            adopter.plan(tampered(good, name=name))
    assert stored(laptop) == []


def test_a_roster_without_us_is_refused_in_the_end(desk: Home, laptop: Home) -> None:
    """Then nothing is stored."""
    adopter = Adopter(laptop.path, laptop.me)
    circle = desk.circle()
    plan = adopter.plan(offer(circle))
    with pytest.raises(PairingFailed, match="without this machine"):
        adopter.store(plan, Paired(desk.me.card, circle.offer(), "Done."))
    assert stored(laptop) == []


def test_an_older_secret_is_no_reason_to_go_back(desk: Home, laptop: Home) -> None:
    """The host missed a rotation: it has to type the code, not to show it."""
    join(laptop, desk.circle())
    old = desk.circle()
    revoke(laptop, desk)
    with pytest.raises(PairingFailed, match=r"older secret of .*type the code there"):
        Adopter(laptop.path, laptop.me).plan(offer(old))


def test_the_other_side_of_a_split_is_joined_only_after_a_question(
    tmp_path: Path, desk: Home, laptop: Home
) -> None:
    """Each revoked the other, so each has a secret of its own."""
    join(laptop, desk.circle())
    nas = Home(tmp_path, "nas")
    revoke(desk, laptop)
    revoke(laptop, desk)
    desk.circle().admit(nas.me.card)
    plan = join(laptop, desk.circle())
    assert plan.question is not None
    assert '"desk" follows another change of the secret of "home"' in plan.question
    assert laptop.namespace() == desk.namespace()
    assert laptop.members() == ["desk", "laptop", "nas"]


def test_what_is_stored_survives_a_roster_that_vanished(desk: Home, laptop: Home) -> None:
    """The circle was known when the plan was made, and its file is gone when it is carried out."""
    join(laptop, desk.circle())
    adopter = Adopter(laptop.path, laptop.me)
    plan = adopter.plan(offer(desk.circle()))
    laptop.namespace().roster_path.unlink()
    adopter.store(plan, admitted(desk.circle(), laptop))
    assert laptop.members() == ["desk", "laptop"]


def test_an_offer_is_judged_by_its_own_roster(desk: Home) -> None:
    """The secret must be the one of the roster's present generation."""
    circle = desk.circle()
    roster = Roster.from_bytes(circle.offer().roster, VERIFIER)
    assert roster.generation.commitment == commitment_to(circle.offer().secret)
    assert isinstance(circle.offer(), Namespace)
