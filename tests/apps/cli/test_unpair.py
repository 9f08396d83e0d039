"""``potluck unpair``: a machine leaves, and is told what that does not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from potluck.apps.cli.main import app
from potluck.net.namespace import NetworkNamespace
from support.command import on_screen
from support.homes import Home, pair


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """A machine in two namespaces: home with another, lab alone."""
    desk = Home(tmp_path, "desk")
    pair(desk, Home(tmp_path, "laptop"))
    desk.circle("lab")
    return desk


def unpair(home: Home, *arguments: str, **variables: str) -> Result:
    """Run the command on a machine."""
    environment = {"POTLUCK_HOME": str(home.path), "POTLUCK_NAMESPACE": None, **variables}
    return CliRunner().invoke(app, ["unpair", *arguments], env=environment)


def kept(home: Home) -> list[str]:
    """The namespaces of a machine."""
    return NetworkNamespace.stored(home=home.path)


def test_leaving_forgets_secret_and_members_here(desk: Home) -> None:
    """The others still list it, and it says so; a namespace nobody joined needs no such words."""
    result = unpair(desk, "--yes")
    assert result.exit_code == 0
    assert 'This machine has left "home"' in result.stdout
    assert "The others still list it as a member" in result.stdout
    assert kept(desk) == ["lab"]
    assert "others" not in unpair(desk, "lab", "--yes").stdout
    assert kept(desk) == []


@pytest.mark.parametrize("way", ["argument", "option", "environment"])
def test_which_one_is_meant_can_be_said_in_three_ways(desk: Home, way: str) -> None:
    """By its place, by the option, by the environment."""
    arguments = {"argument": ["lab"], "option": ["--namespace", "lab"]}.get(way, [])
    variables = {"POTLUCK_NAMESPACE": "lab"} if way == "environment" else {}
    result = unpair(desk, *arguments, "--yes", "--json", **variables)
    assert json.loads(result.stdout) == {"left": "lab"}
    assert kept(desk) == ["home"]


def test_what_is_damaged_can_still_be_left(desk: Home) -> None:
    """It is the advice that the damage itself gives."""
    (desk.path / "namespaces" / "home" / "secret").write_bytes(b"half")
    assert unpair(desk, "home", "--yes").exit_code == 0
    assert kept(desk) == ["lab"]


def test_an_unknown_one_is_an_error(desk: Home) -> None:
    """With the names there are."""
    result = unpair(desk, "attic", "--yes")
    assert result.exit_code == 1
    assert "no namespace 'attic'. Those it is in: home, lab." in result.stderr


def test_a_person_is_asked(desk: Home) -> None:
    """No means no."""
    variables = {"POTLUCK_HOME": str(desk.path), "POTLUCK_NAMESPACE": ""}
    with on_screen("unpair", variables=variables) as screen:
        screen.read_until('Leave "home"?')
        screen.type("n\r")
        assert screen.read_to_end() == 1
    assert kept(desk) == ["home", "lab"]
