"""``potluck revoke`` and ``potluck rotate``: what takes effect, what waits, and who is meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from potluck.apps.cli.main import app
from potluck.apps.cli.membership import UnknownMember, find_member
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.node import NodeIdentity, short_name
from potluck.trust.membership_store import signer_of
from support.homes import Home, pair


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """A machine."""
    return Home(tmp_path, "desk")


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    """Another one."""
    return Home(tmp_path, "laptop")


@pytest.fixture
def nas(tmp_path: Path) -> Home:
    """A third one."""
    return Home(tmp_path, "nas")


def run(home: Home, *arguments: str) -> Result:
    """Run a command on a machine."""
    environment = {"POTLUCK_HOME": str(home.path), "POTLUCK_NAMESPACE": None}
    return CliRunner().invoke(app, arguments, env=environment)


def test_of_two_machines_one_revokes_the_other(desk: Home, laptop: Home) -> None:
    """At once, by name; the secret here is new."""
    pair(desk, laptop)
    before = desk.namespace()
    result = run(desk, "revoke", "laptop", "--yes")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        '"home" has a new secret on this machine.',
        "laptop was revoked by desk; only pairing it again brings it back.",
    ]
    assert desk.namespace() != before
    assert desk.namespace().previous == (before.secret,)
    assert desk.members() == ["desk"]


def test_with_three_machines_it_waits_and_says_for_whom(
    desk: Home, laptop: Home, nas: Home
) -> None:
    """Nothing is pretended: everybody is still a member, and the old secret holds."""
    pair(desk, laptop)
    pair(desk, nas)
    before = desk.namespace()
    result = run(desk, "revoke", laptop.me.node_id[:8], "--yes")
    assert result.exit_code == 0
    assert "Nothing has changed yet" in result.stdout
    assert "Revoking laptop needs one more signature" in result.stdout
    assert "These machines have not signed: nas." in result.stdout
    assert "the old secret is in force" in result.stdout
    assert desk.namespace() == before
    assert desk.members() == ["desk", "laptop", "nas"]


def test_a_program_gets_the_same_facts(desk: Home, laptop: Home, nas: Home) -> None:
    """What waits, for whom, and who is out; a guest of the revoked one may be kept by name."""
    pair(desk, laptop)
    pair(laptop, nas)
    desk.join_records_of(laptop)
    facts = json.loads(run(desk, "rotate", "--yes", "--json").stdout)
    assert (facts["took_effect"], facts["out"], facts["generation"]) == (False, [], 0)
    assert [change["revokes"] for change in facts["pending"]] == [None]
    options = ["--keep-guest", "nas", "--yes", "--json"]
    facts = json.loads(run(desk, "revoke", "laptop", *options).stdout)
    (pending,) = facts["pending"]  # the one before is withdrawn: nobody else had signed it
    assert pending["revokes"] == laptop.me.node_id
    (rotation,) = [change.rotation for change in desk.membership().roster.pending]
    assert rotation.keeps == (nas.me.node_id,)


def test_the_same_command_on_another_machine_agrees(desk: Home, laptop: Home, nas: Home) -> None:
    """It signs what the first one proposed instead of proposing something else."""
    pair(desk, laptop)
    pair(desk, nas)
    laptop.join_records_of(desk)
    assert run(desk, "revoke", "laptop", "--yes").exit_code == 0
    nas.join_records_of(desk)
    shown = run(nas, "members").stdout
    assert f"To agree, on this machine: potluck revoke {laptop.me.node_id[:8]}" in shown
    assert "To agree" not in run(desk, "members").stdout
    asked = run(nas, "revoke", "laptop")
    assert asked.exit_code == 1
    assert f"that desk proposed? It takes out laptop ({laptop.me.node_id})." in asked.stderr
    result = run(nas, "revoke", "laptop", "--yes")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        (
            '"home" gets a new secret: enough machines have agreed. '
            "This one has it as soon as it connects to one that does."
        ),
        "laptop was revoked by desk; only pairing it again brings it back.",
    ]
    assert nas.members() == ["desk", "nas"]


def test_a_rotation_is_agreed_to_by_the_same_command(desk: Home, laptop: Home) -> None:
    """Whoever has signed already does not sign twice: it proposes anew, or is told to wait."""
    pair(desk, laptop)
    run(desk, "rotate", "--yes")
    laptop.join_records_of(desk)
    assert "To agree, on this machine: potluck rotate" in run(laptop, "members").stdout
    asked = run(laptop, "rotate")
    assert "It takes out no machine." in asked.stderr
    facts = json.loads(run(laptop, "rotate", "--yes", "--json").stdout)
    assert (facts["took_effect"], facts["generation"]) == (True, 1)
    desk.join_records_of(laptop)
    assert desk.membership().has_secret


def test_who_wants_to_keep_others_proposes_something_else(
    desk: Home, laptop: Home, nas: Home, tmp_path: Path
) -> None:
    """A proposal that lets other guests stay is not the same proposal."""
    pair(desk, laptop)
    pair(laptop, nas)
    desk.join_records_of(laptop)
    tablet = Home(tmp_path, "tablet")
    pair(desk, tablet)
    run(desk, "revoke", "laptop", "--yes")
    tablet.join_records_of(desk)
    facts = json.loads(
        run(tablet, "revoke", "laptop", "--keep-guest", "nas", "--yes", "--json").stdout
    )
    assert len(facts["pending"]) == 2


@pytest.mark.parametrize("arguments", [["revoke", "laptop"], ["rotate"], ["members"]])
def test_a_passphrase_has_no_members_to_manage(desk: Home, arguments: list[str]) -> None:
    """The error says what to do instead."""
    words = "unruly copper migrant walnut tracing spoof"
    NetworkNamespace.from_passphrase("lab", words, home=desk.path).save()
    result = run(desk, *arguments, "--namespace", "lab")
    assert result.exit_code == 1
    assert "every machine with its passphrase is a member" in result.stderr
    assert "choose another passphrase" in result.stderr


def test_a_member_that_is_not_there_is_told(desk: Home, laptop: Home) -> None:
    """Before anything is proposed."""
    pair(desk, laptop)
    result = run(desk, "rotate", "--yes", "--host", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "127.0.0.1:1 could not be reached: Connection refused." in result.stderr
    assert desk.membership().roster.pending == ()


def test_a_machine_alone_gets_a_new_secret_at_once(desk: Home) -> None:
    """Nobody else has to agree."""
    before = desk.namespace()
    result = run(desk, "rotate", "--yes")
    assert result.stdout == '"home" has a new secret on this machine.\n'
    assert desk.namespace() != before


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        (["revoke", "laptop"], "Take laptop"),
        (["rotate"], 'Give "home" a new secret?'),
        (["unpair"], 'Leave "home"?'),
    ],
)
def test_what_cannot_be_taken_back_is_asked_first(
    desk: Home, laptop: Home, arguments: list[str], question: str
) -> None:
    """Where nobody can answer, nothing is done and the command fails."""
    pair(desk, laptop)
    before = desk.namespace()
    result = run(desk, *arguments)
    assert result.exit_code == 1
    assert question in result.stderr
    assert "to agree, add --yes" in result.stderr
    assert desk.namespace() == before
    assert desk.members() == ["desk", "laptop"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("tablet", "No member is called 'tablet'. Give a name or an id."),
        ("desk", "A machine cannot revoke itself. Use `potluck unpair`."),
        ("la", "No member is called 'la'"),
    ],
)
def test_who_cannot_be_revoked_is_told(desk: Home, laptop: Home, target: str, words: str) -> None:
    """With the members there are, or the command that does it."""
    pair(desk, laptop)
    result = run(desk, "revoke", target, "--yes")
    assert result.exit_code == 1
    assert words in result.stderr
    assert desk.members() == ["desk", "laptop"]


def test_a_member_is_meant_by_any_of_its_names(tmp_path: Path, desk: Home) -> None:
    """Its name in any case, the readable one, its id or the beginning of that; never a guess."""
    pair(desk, Home(tmp_path / "one", "laptop"))
    roster = desk.membership().roster
    for text in ("DESK", short_name(desk.me.node_id), desk.me.node_id, desk.me.node_id[:4]):
        assert find_member(roster, text).node_id == desk.me.node_id
    pair(desk, Home(tmp_path / "two", "laptop"))
    with pytest.raises(
        UnknownMember, match=r"Several members are called 'laptop'.*Give its whole id"
    ):
        find_member(desk.membership().roster, "laptop")


def test_nobody_can_take_the_place_of_another_by_its_name(tmp_path: Path, desk: Home) -> None:
    """A guest that is called like the beginning of another's id, or like all of it."""
    laptop = Home(tmp_path, "laptop")
    pair(desk, laptop)
    node_id = laptop.me.node_id
    roster = desk.membership().roster
    for name in (node_id[:8], node_id):
        sly = signer_of(NodeIdentity.ephemeral(), name)
        roster = roster.admit(sly.card, desk.me)
        assert find_member(roster, node_id).node_id == node_id
    with pytest.raises(UnknownMember, match="Several members are called"):
        find_member(roster, node_id[:8])


def test_whoever_is_out_already_is_said_to_be(desk: Home, laptop: Home) -> None:
    """Revoking it once more is not an unknown name."""
    pair(desk, laptop)
    assert run(desk, "revoke", "laptop", "--yes").exit_code == 0
    result = run(desk, "revoke", "laptop", "--yes")
    assert result.exit_code == 1
    assert "laptop was revoked by desk; only pairing it again brings it back." in result.stderr
