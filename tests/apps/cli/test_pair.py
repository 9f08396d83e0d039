"""``potluck pair`` as people and scripts run it: two processes, two homes, one code."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from potluck.apps.cli.main import app
from potluck.apps.cli.pair_host import _Voice
from potluck.core.pairing import parse_code
from potluck.net.addresses import Address, parse_address
from potluck.net.names import short_name
from potluck.net.pairing import PAIRING_PORT
from potluck.net.pairing_discovery import DiscoveryUnavailable, PairingDiscovery
from potluck.net.pairing_listener import PairingListener
from potluck.runtime.pairing import PairingFailed
from support.command import on_screen, potluck, started
from support.homes import CODE, WRONG, Home, Hosting, call, hello_of, pair
from support.threads import Background, eventually

WORDS = re.compile(r"\b\d{1,2}-[a-z]+-[a-z]+\b")


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """A machine that shows codes."""
    return Home(tmp_path, "desk")


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    """A machine on which they are typed."""
    return Home(tmp_path, "laptop")


def at(home: Home, **more: str) -> dict[str, str]:
    """The environment of a machine."""
    return {"POTLUCK_HOME": str(home.path), "POTLUCK_NAMESPACE": "", **more}


def run(home: Home, *arguments: str, typed: str = "") -> Result:
    """Run the command on a machine, within this process."""
    return CliRunner().invoke(app, ["pair", *arguments], env=at(home), input=typed)


def events(process: subprocess.Popen[str]) -> Any:
    """The next event of a command that speaks JSON."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def loopback(shown: dict[str, Any]) -> str:
    """Where a host that shows its code as JSON is, from this machine."""
    return f"127.0.0.1:{shown['port']}"


# --- the whole story ---


def test_two_processes_become_one_circle(desk: Home, laptop: Home) -> None:
    """One shows a code, the other types it; both show the other, and list the same members."""
    with started("pair", "--json", variables=at(desk)) as host:
        shown = events(host)
        assert shown["event"] == "code"
        assert shown["namespace"] == "home"
        typed = shown["code"].replace("-", " ").upper().split()
        guest = potluck("pair", *typed, "--host", loopback(shown), "--json", variables=at(laptop))
        assert guest.returncode == 0, guest.stderr
        joined = json.loads(guest.stdout)
        paired = events(host)
        assert host.wait(30) == 0
    assert joined["event"] == paired["event"] == "paired"
    assert joined["peer"]["id"] == desk.me.node_id
    assert paired["peer"]["id"] == laptop.me.node_id
    assert joined["namespace"] == paired["namespace"] == "home"
    assert guest.stderr == ""
    assert desk.namespace() == laptop.namespace()
    assert len(desk.members()) == len(laptop.members()) == 2


def test_three_wrong_tries_and_there_is_no_fourth(desk: Home, laptop: Home) -> None:
    """Each person is told what happened, in words, and both commands fail with 1."""
    with started("pair", variables=at(desk)) as host:
        assert host.stdout is not None
        text = ""
        while "Waiting" not in text:
            text += host.stdout.readline()
        (code,) = WORDS.findall(text)
        port = re.search(r"--host \S+?:(\d+)", text)  # unless it is the usual one
        where = Address("127.0.0.1", int(port[1]) if port else PAIRING_PORT)
        slot, first, second = code.split("-")
        for left in ("2 tries are left", "one try is left", "0 tries are left"):
            with pytest.raises(PairingFailed, match="did not accept the code"):
                laptop.join(where, f"{slot}-{second}-{first}")
            assert left in host.stdout.readline()
        assert host.wait(30) == 1
        assert host.stderr is not None
        assert "All 3 tries are used. Run `potluck pair` again" in host.stderr.read()
    late = run(laptop, code, "--host", str(where))
    assert late.exit_code == 1
    assert "Check that `potluck pair` is waiting there" in late.stderr
    assert not (laptop.path / "namespaces").exists()


def test_ctrl_c_ends_it_cleanly(desk: Home, laptop: Home) -> None:
    """The code is dead at once, whoever is connected is told, and the exit code says why."""
    with started("pair", "--json", variables=at(desk)) as host:
        shown = events(host)
        with call(parse_address(loopback(shown))) as caller:
            caller.settimeout(30)
            caller.sendall(hello_of(laptop, shown["code"]))
            assert b"reply" in caller.recv(1000)
            host.send_signal(signal.SIGINT)
            assert b"code-dead" in caller.recv(1000)
        assert host.wait(30) == 130
        assert host.stderr is not None
        assert host.stderr.read() == "Interrupted.\n"


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["words", "json"])
def test_the_person_at_the_host_is_told_everything(
    desk: Home, laptop: Home, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """That nobody can find it here, that a try failed, and who has joined."""
    opened: list[PairingListener] = []

    def listen() -> PairingListener:
        opened.append(PairingListener(port=0))
        return opened[0]

    def deaf(**_options: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr("potluck.apps.cli.pair_host.open_listener", listen)
    monkeypatch.setattr("potluck.apps.cli.pair_host.new_code", lambda *_: parse_code(CODE))
    monkeypatch.setattr("zeroconf.Zeroconf", deaf)
    hosting = Background(lambda: run(desk, *options))
    eventually(lambda: bool(opened))
    where = Address("127.0.0.1", opened[0].port)
    with pytest.raises(PairingFailed):
        laptop.join(where, WRONG)
    laptop.join(where)
    result = hosting.result()
    assert result.exit_code == 0
    for words in (
        CODE,
        "--host is needed",
        "laptop",
        "does not know the code",
        laptop.me.node_id,
        short_name(laptop.me.node_id),
    ):
        assert words in result.stdout
    if options:
        found = [json.loads(line)["event"] for line in result.stdout.splitlines()]
        assert found == ["code", "warning", "try failed", "paired"]


def test_an_announcement_that_fails_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code works with --host all the same."""

    def refused(*_arguments: object) -> None:
        raise DiscoveryUnavailable("no")

    monkeypatch.setattr(PairingDiscovery, "announce", refused)
    with _Voice() as voice:
        assert not voice.announce(parse_code(CODE), 1)


# --- in a terminal ---


def test_a_terminal_shows_the_time_that_is_left(desk: Home) -> None:
    """Below the code, in one line that changes; without colours if none are wanted."""
    with on_screen("pair", variables=at(desk, NO_COLOR="1")) as screen:
        screen.read_until("Valid for 4:5")
        assert "3 tries are left" in screen.text
        assert WORDS.search(screen.text)
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", screen.raw)
        screen.type("\x03")
        assert screen.read_to_end() == 130


def test_joining_a_second_namespace_asks(desk: Home, laptop: Home, tmp_path: Path) -> None:
    """The person sees who offers what, and may have both."""
    pair(Home(tmp_path, "nas"), laptop)
    before = laptop.namespace()
    with Hosting(desk, namespace="lab") as hosting:
        options = ["pair", CODE, "--host", str(hosting.where)]
        with on_screen(*options, variables=at(laptop)) as screen:
            screen.read_until('Join "lab" instead? (y: yes, k: keep both, n: no)')
            assert f"with the id {desk.me.node_id}" in screen.text
            screen.type("k\r")
            assert screen.read_to_end() == 0
        hosting.outcome.result()
    assert laptop.namespace() == before
    assert laptop.namespace("lab") == desk.namespace("lab")


@pytest.mark.parametrize(
    ("answer", "code", "stays"), [("yes", 0, False), ("n", 1, True), ("", 1, True), ("?", 1, True)]
)
def test_only_yes_means_yes(
    desk: Home, laptop: Home, tmp_path: Path, answer: str, code: int, stays: bool
) -> None:
    """Anything else leaves everything as it is, and the other machine is told."""
    nas = Home(tmp_path, "nas")
    pair(nas, laptop)
    with Hosting(desk) as hosting:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("potluck.apps.cli.pair_guest.can_ask", lambda: True)
            result = run(laptop, CODE, "--host", str(hosting.where), typed=f"{answer}\n")
        assert result.exit_code == code, result.output
        if stays:
            with pytest.raises(PairingFailed, match="chose not to join"):
                hosting.outcome.result()
    assert laptop.namespace() == (nas if stays else desk).namespace()


# --- questions that nobody can be asked ---


def test_a_script_has_to_say_what_it_wants(desk: Home, laptop: Home, tmp_path: Path) -> None:
    """Found out before the code is used; then --yes leaves the old one and --keep keeps it."""
    nas = Home(tmp_path, "nas")
    pair(nas, laptop)
    with Hosting(desk) as hosting:
        where = ["--host", str(hosting.where)]
        refused = run(laptop, CODE, *where)
        assert refused.exit_code == 1
        assert "Add --yes to leave it for the new one, or --keep" in refused.stderr
        assert hosting.failures == []
        kept = run(laptop, CODE, *where, "--keep")
        assert kept.exit_code == 0, kept.stderr
        assert 'It is in "home" as before; --namespace says which one is meant.' in kept.stdout
        assert 'Here it is called "home-2".' in kept.stdout
        assert "`potluck unpair home-2` leaves it." in kept.stdout
        assert f"with the id {desk.me.node_id}" in kept.stdout
        hosting.outcome.result()
    assert laptop.namespace("home") == nas.namespace()
    assert laptop.namespace("home-2") == desk.namespace()
    with Hosting(Home(tmp_path, "tower")) as hosting:
        left = run(laptop, CODE, "--host", str(hosting.where), "--yes")
        assert left.exit_code == 0, left.stderr
        assert 'It is in "home-2" as before' in left.stdout
        assert "?" not in left.stdout  # nobody was asked
    assert laptop.namespace("home") not in {nas.namespace(), desk.namespace()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "10.0.0.1"], "it goes with a CODE"),
        (["--yes"], "it goes with a CODE"),
        ([CODE, "--yes", "--keep"], "leaves or it keeps"),
        ([CODE, "--host", "a b"], "is no address"),
    ],
)
def test_options_that_do_not_fit_together_are_wrong_usage(
    laptop: Home, arguments: list[str], words: str
) -> None:
    """Exit code 2, before anything is done."""
    result = run(laptop, *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", "").split())


def test_a_slip_of_the_finger_is_named(laptop: Home) -> None:
    """With what was probably meant; nobody is called for it."""
    result = run(laptop, "7-gitar-harbor")
    assert result.exit_code == 1
    assert 'There is no code word "gitar". Did you mean 7-guitar-harbor?' in result.stderr


def test_a_code_that_fails_says_why_on_stderr_alone(desk: Home, laptop: Home) -> None:
    """Also with --json: stdout stays clean for the program that reads it."""
    with Hosting(desk, WRONG) as hosting:
        result = run(laptop, CODE, "--host", str(hosting.where), "--json")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "did not accept the code" in result.stderr


def test_without_multicast_the_other_way_is_named(
    laptop: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a word of sockets: the address has to be given."""

    def refused(**_options: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr("zeroconf.Zeroconf", refused)
    result = run(laptop, CODE)
    assert result.exit_code == 1
    assert "cannot find each other on this network" in result.stderr
    assert "potluck pair CODE --host ADDRESS" in result.stderr
