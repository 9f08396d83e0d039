"""``potluck members``: everybody of a namespace with a sentence, for people and programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from potluck.apps.cli.main import app
from support.homes import Home, pair


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """A machine."""
    return Home(tmp_path, "desk")


def members(home: Home, *arguments: str) -> Result:
    """Run the command on a machine."""
    environment = {"POTLUCK_HOME": str(home.path), "POTLUCK_NAMESPACE": None, "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["members", *arguments], env=environment)


def test_everybody_has_a_line_and_a_sentence(desk: Home, tmp_path: Path) -> None:
    """The founder, the one it brought in, and which of them is this machine."""
    laptop = Home(tmp_path, "laptop")
    pair(desk, laptop)
    result = members(laptop)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert 'Members of "home":' in lines[0]
    (first,) = [line for line in lines if line.startswith("desk ")]
    (second,) = [line for line in lines if line.startswith("laptop ")]
    assert "it founded this circle." in first
    assert "brought in by desk. This is it." in second
    assert desk.me.node_id[:8] in first


def test_a_program_gets_all_of_it(desk: Home, tmp_path: Path) -> None:
    """Whole ids, sponsors, who has left, and what waits for signatures."""
    laptop, nas = Home(tmp_path, "laptop"), Home(tmp_path, "nas")
    pair(desk, laptop)
    circle = desk.circle()
    circle.propose(lambda roster, secret: roster.revoke(laptop.me.node_id, desk.me, secret))
    desk.circle().admit(nas.me.card)
    circle = desk.circle()
    circle.propose(lambda roster, secret: roster.rotate(desk.me, secret))
    facts = json.loads(members(desk, "--json").stdout)
    assert facts["namespace"] == "home"
    assert facts["generation"] == 1
    rows = {row["name"]: row for row in facts["members"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "desk": "member",
        "nas": "member",
        "laptop": "revoked",
    }
    assert rows["nas"]["sponsors"] == [desk.me.node_id]
    assert rows["desk"]["is_this_machine"]
    assert "was revoked by desk" in rows["laptop"]["reason"]
    (pending,) = facts["pending"]
    assert "one more signature" in pending["reason"]
    assert "one more signature" in members(desk).stdout


def test_looking_at_a_new_machine_changes_nothing(desk: Home) -> None:
    """One that is in no namespace says so; one that nobody joined is alone."""
    result = members(desk)
    assert result.exit_code == 1
    assert "knows no namespace 'home'" in result.stderr
    assert not (desk.path / "namespaces").exists()
    desk.namespace()
    assert "it founded this circle" in members(desk).stdout
    assert not desk.namespace().roster_path.exists()
    assert members(desk, "--namespace", "lab").exit_code == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "a b", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_wrong_usage(desk: Home, host: str) -> None:
    """With how to write one; it is no fault of Potluck's."""
    desk.namespace()
    result = members(desk, "--host", host)
    assert result.exit_code == 2
    assert "is no address; write host:port" in " ".join(result.stderr.replace("│", "").split())


def test_nobody_at_the_address_is_told_with_what_to_check(desk: Home) -> None:
    """Any program of a member will do there."""
    desk.namespace()
    result = members(desk, "--host", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "could not be reached: Connection refused. Check that a program" in result.stderr
    result = members(desk, "--host", "nowhere.invalid:1")
    assert "Check the spelling" in result.stderr


def test_a_machine_that_is_none_of_the_members_is_told(desk: Home, tmp_path: Path) -> None:
    """Its key was deleted; it has to be paired again, and every command says so."""
    laptop = Home(tmp_path, "laptop")
    pair(desk, laptop)
    (laptop.path / "node_keypair").unlink()
    assert "is none of them." in members(laptop).stdout
    environment = {"POTLUCK_HOME": str(laptop.path), "POTLUCK_NAMESPACE": None}
    for command in (["rotate", "--yes"], ["pair"]):
        result = CliRunner().invoke(app, command, env=environment)
        assert result.exit_code == 1
        assert 'is not a member of "home": its key was replaced' in result.stderr
        assert "potluck unpair home" in result.stderr
