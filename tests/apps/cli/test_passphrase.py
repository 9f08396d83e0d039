"""``potluck passphrase``: a group of all who know it, made from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from potluck import NetworkNamespace
from potluck.apps.cli.main import app
from potluck.net.namespace import Protection

WORDS = "anvil quartz lemming turbine saffron oboe gravel"


def flat(text: str) -> str:
    """Without the line breaks and frames that depend on the width."""
    return " ".join(text.replace("│", " ").split())


def command(home: Path, *arguments: str, typed: str | None = None, **variables: str) -> Result:
    """Run the command on a machine."""
    environment = {
        "POTLUCK_HOME": str(home),
        "POTLUCK_NAMESPACE": None,
        "POTLUCK_PASSPHRASE": None,
        **variables,
    }
    return CliRunner().invoke(app, ["passphrase", *arguments], env=environment, input=typed)


def test_two_machines_with_one_passphrase_are_in_one_group(tmp_path: Path) -> None:
    """One reads it from stdin, one from the environment; spaces at the end do not matter."""
    first = command(tmp_path / "desk", "lab", "--stdin", "--json", typed=f"{WORDS} \r\nmore\n")
    second = command(tmp_path / "laptop", "Lab", "--json", POTLUCK_PASSPHRASE=WORDS)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    told = [json.loads(each.stdout) for each in (first, second)]
    assert told[0] == told[1] == {"namespace": "lab", "tag": told[0]["tag"], "new": True}
    desk, laptop = (NetworkNamespace.load("lab", home=tmp_path / n) for n in ("desk", "laptop"))
    assert desk == laptop == NetworkNamespace.from_passphrase("lab", WORDS)
    assert desk.protection is Protection.PASSPHRASE
    assert WORDS.split(maxsplit=1)[0] not in (first.output + second.output)
    assert NetworkNamespace.load_or_create(home=tmp_path / "desk").name == "lab"  # it is used


def test_the_same_passphrase_again_changes_nothing(tmp_path: Path) -> None:
    """It says that this machine was in already."""
    command(tmp_path, "lab", POTLUCK_PASSPHRASE=WORDS)
    again = command(tmp_path, "lab", POTLUCK_PASSPHRASE=WORDS)
    assert again.exit_code == 0
    assert 'was already in "lab"' in flat(again.stdout)


def test_another_group_of_that_name_is_left_only_if_the_person_agrees(tmp_path: Path) -> None:
    """Its secret would be gone."""
    before = NetworkNamespace.generate("lab", home=tmp_path)
    before.save()
    before.mark_used()
    refused = command(tmp_path, "lab", POTLUCK_PASSPHRASE=WORDS)
    assert refused.exit_code == 1
    assert NetworkNamespace.load("lab", home=tmp_path) == before
    agreed = command(tmp_path, "lab", "--yes", POTLUCK_PASSPHRASE=WORDS)
    assert agreed.exit_code == 0
    assert NetworkNamespace.load("lab", home=tmp_path).protection is Protection.PASSPHRASE


@pytest.mark.parametrize(
    ("arguments", "typed", "variables", "code", "said"),
    [
        (["lab"], None, {}, 1, "--stdin, or in POTLUCK_PASSPHRASE"),
        (["lab", "--stdin"], "\n", {}, 2, "empty"),
        (["lab", "--stdin"], WORDS, {"POTLUCK_PASSPHRASE": WORDS}, 2, "use one"),
        (["lab", "--stdin"], "password1", {}, 1, "could be guessed"),
        (["open", "--stdin"], WORDS, {}, 1, "reserved"),
        (["a/b", "--stdin"], WORDS, {}, 1, "a/b"),
        ([], None, {}, 2, "NAMESPACE"),
        (["lab", WORDS], None, {}, 2, "unexpected"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path,
    arguments: list[str],
    typed: str | None,
    variables: dict[str, str],
    code: int,
    said: str,
) -> None:
    """And nothing is kept; a passphrase in the arguments is refused."""
    result = command(tmp_path, *arguments, typed=typed, **variables)
    assert result.exit_code == code
    assert said in flat(result.output)
    assert NetworkNamespace.stored(home=tmp_path) == []


def test_in_a_terminal_it_is_asked_for_twice_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As everywhere where a secret is typed; a slip of the second time is noticed."""
    monkeypatch.setattr("potluck.apps.cli.circle.can_ask", lambda: True)
    result = command(tmp_path, "lab", typed=f"{WORDS}\nsomething else\n{WORDS}\n{WORDS}\n")
    assert result.exit_code == 0, result.output
    assert "anvil" not in result.output
    assert "do not match" in result.output
    expected = NetworkNamespace.from_passphrase("lab", WORDS)
    assert NetworkNamespace.load("lab", home=tmp_path) == expected
