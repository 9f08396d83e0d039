"""Who may open a connection: by the roster, and by nothing else where there is one."""

from __future__ import annotations

import pytest

from potluck.core.handshake import Refused
from potluck.core.introduction import (
    Exchange,
    Granted,
    digest,
    judge_hello,
    judge_ourselves,
    judge_peer,
    judge_teller,
)
from potluck.core.roster_exchange import Verdict
from potluck.vocabulary import NodeId
from support.circle import Circle

STRANGER = NodeId("z" * 32)
OTHER_ROSTER = b"d" * 32


@pytest.fixture
def circle() -> Circle:
    """Three machines, of which ben has been revoked."""
    circle = Circle("anna", "ben", "cleo")
    name = circle.revoke("anna", "ben")
    circle.meet("anna", "cleo")
    circle.sign("cleo", name)
    circle.meet("anna", "cleo")
    return circle


def sentence(answer: object) -> str:
    """Why not."""
    assert isinstance(answer, Refused)
    return answer.sentence


def test_equal_rosters_have_equal_digests(circle: Circle) -> None:
    """Whatever a machine remembers for itself alone; another roster has another digest."""
    assert digest(circle.rosters["anna"]) == digest(circle.rosters["cleo"])
    assert digest(circle.rosters["anna"]) != digest(circle.rosters["ben"])


def test_where_both_agree_nothing_more_is_said(circle: Circle) -> None:
    """The usual case costs no further message."""
    mine = circle.rosters["anna"]
    told = digest(circle.rosters["cleo"])
    assert judge_hello(mine, circle.id("cleo"), told, is_current=True) == Granted()
    assert judge_hello(mine, circle.id("cleo"), b"", is_current=True) == Granted()


def test_where_they_do_not_agree_they_tell(circle: Circle) -> None:
    """A member with another roster, and somebody new that another member may have brought in."""
    mine = circle.rosters["anna"]
    for caller in (circle.id("cleo"), STRANGER, circle.id("ben")):
        assert judge_hello(mine, caller, OTHER_ROSTER, is_current=True) == Exchange()


def test_an_earlier_secret_opens_the_exchange_for_members_alone(circle: Circle) -> None:
    """Also where both go by the same roster: what the caller lacks is the secret."""
    mine = circle.rosters["anna"]
    for told in (b"", OTHER_ROSTER, digest(mine)):
        assert judge_hello(mine, circle.id("cleo"), told, is_current=False) == Exchange()
        refused = judge_hello(mine, circle.id("ben"), told, is_current=False)
        assert sentence(refused) == (
            "not a member: ben was revoked by anna; only pairing it again brings it back."
        )
        refused = judge_hello(mine, STRANGER, told, is_current=False)
        assert sentence(refused).startswith("not a member: No machine with the id")
        assert sentence(refused).endswith("Pair it first: `potluck pair`.")


def test_who_tells_nothing_must_be_known(circle: Circle) -> None:
    """A secret without a roster makes nobody a member."""
    refused = judge_hello(circle.rosters["anna"], STRANGER, b"", is_current=True)
    assert sentence(refused).startswith("not a member")


@pytest.mark.parametrize("is_current", [True, False])
def test_where_there_is_no_roster_whoever_has_the_secret_belongs(is_current: bool) -> None:
    """A passphrase, the open namespace."""
    assert judge_hello(None, STRANGER, OTHER_ROSTER, is_current=is_current) == Granted()
    assert judge_peer(None, STRANGER) is None


def test_who_answers_must_be_a_member_too(circle: Circle) -> None:
    """By our own roster."""
    mine = circle.rosters["anna"]
    assert judge_peer(mine, circle.id("cleo")) is None
    assert "ben was revoked" in sentence(judge_peer(mine, circle.id("ben")))


def test_what_was_told_decides(circle: Circle) -> None:
    """Who has no business with us, who is no member, and who is."""
    taken = circle.tell("ben", "anna")
    assert taken.verdict is Verdict.REFUSED
    assert "ben was revoked by anna" in sentence(judge_teller(taken, circle.id("ben")))
    taken = circle.tell("cleo", "anna")
    assert judge_teller(taken, circle.id("cleo")) is None
    assert "No machine with the id" in sentence(judge_teller(taken, STRANGER))
    assert judge_ourselves(taken) is None


def test_who_could_follow_by_signing_says_where_to_look() -> None:
    """A person has to look at it first: a forged change would look just like that."""
    circle = Circle("anna", "emil")
    circle.pair("anna", "ben")
    name = circle.rotate("anna")
    circle.meet("anna", "ben")
    circle.sign("ben", name)
    circle.meet("anna", "ben")
    refused = judge_ourselves(circle.tell("anna", "emil"))
    assert sentence(refused).endswith(
        "this machine may sign too. `potluck members` there shows to what."
    )


def test_who_cannot_follow_says_why(circle: Circle) -> None:
    """Ben hears that the others have gone on without him."""
    taken = circle.tell("anna", "ben")
    assert judge_teller(taken, circle.id("anna")) is None
    assert sentence(judge_ourselves(taken)) == (
        "the two go by different rosters: anna and the others it needed revoked this machine."
    )
