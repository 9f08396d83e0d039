"""``potluck members``: everybody of a namespace with a sentence, for people and programs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from potluck import NetworkNamespace
from potluck.apps.cli.main import app
from potluck.apps.cli.pairing import _Announcement
from potluck.discovery.mdns import DiscoveryUnavailable
from potluck.identity.namespace import NetworkNamespace as NamespaceNetworkNamespace
from potluck.identity.namespace import Protection
from potluck.identity.node import short_name
from potluck.net.addresses import Address, parse_address
from potluck.trust.pairing import PairingFailed
from potluck.trust.pairing_code import parse_code
from potluck.trust.pairing_net import PAIRING_PORT, PairingDiscovery, PairingListener
from support.command import on_screen, potluck, started
from support.homes import CODE, WRONG, Home, Hosting, call, hello_of, pair
from support.threads import Background, eventually


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
    assert "it started this group." in first
    assert "added by desk. This machine." in second
    assert desk.me.node_id[:8] in first


def test_a_list_may_not_be_the_latest_and_says_when_it_will_be(desk: Home, tmp_path: Path) -> None:
    """Another member may have brought in a machine that this one has not heard of."""
    assert "paired elsewhere" not in members(desk).stdout  # there is no other member
    pair(desk, Home(tmp_path, "laptop"))
    assert (
        "A machine that was paired elsewhere is listed once this one has met a machine that "
        "knows it: in a job, or with --host." in members(desk).stdout
    )


def test_a_program_gets_all_of_it(desk: Home, tmp_path: Path) -> None:
    """Whole ids, sponsors, who has left, and what waits for signatures."""
    laptop, nas = Home(tmp_path, "laptop"), Home(tmp_path, "nas")
    pair(desk, laptop)
    membership = desk.membership()
    membership.propose(lambda roster, secret: roster.revoke(laptop.me.node_id, desk.me, secret))
    desk.membership().admit(nas.me.card)
    membership = desk.membership()
    membership.propose(lambda roster, secret: roster.rotate(desk.me, secret))
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
    assert "is not in a group named 'home'" in result.stderr
    assert not (desk.path / "namespaces").exists()
    desk.namespace()
    assert "it started this group" in members(desk).stdout
    assert not desk.namespace().roster_path.exists()
    assert members(desk, "--namespace", "lab").exit_code == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "a b", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_wrong_usage(desk: Home, host: str) -> None:
    """With how to write one; it is no fault of Potluck's."""
    desk.namespace()
    result = members(desk, "--host", host)
    assert result.exit_code == 2
    assert "is not an address: write host:port" in " ".join(result.stderr.replace("│", "").split())


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
    assert "is not in it." in members(laptop).stdout
    environment = {"POTLUCK_HOME": str(laptop.path), "POTLUCK_NAMESPACE": None}
    for command in (["rotate", "--yes"], ["pair"]):
        result = CliRunner().invoke(app, command, env=environment)
        assert result.exit_code == 1
        assert 'is not a member of "home": its key was replaced' in result.stderr
        assert "potluck unpair home" in result.stderr


# --------------------------------------------------------------------------------------------------
# ``potluck pair`` as people and scripts run it: two processes, two homes, one code.

WORDS = re.compile(r"\b\d{1,2}-[a-z]+-[a-z]+\b")


@pytest.fixture
def pair_desk(tmp_path: Path) -> Home:
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


def test_two_processes_become_one_group(pair_desk: Home, laptop: Home) -> None:
    """One shows a code, the other types it; both show the other, and list the same members."""
    with started("pair", "--json", variables=at(pair_desk)) as host:
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
    assert joined["peer"]["id"] == pair_desk.me.node_id
    assert paired["peer"]["id"] == laptop.me.node_id
    assert joined["namespace"] == paired["namespace"] == "home"
    assert guest.stderr == ""
    assert pair_desk.namespace() == laptop.namespace()
    assert len(pair_desk.members()) == len(laptop.members()) == 2


def test_three_wrong_tries_and_there_is_no_fourth(pair_desk: Home, laptop: Home) -> None:
    """Each person is told what happened, in words, and both commands fail with 1."""
    with started("pair", variables=at(pair_desk)) as host:
        assert host.stdout is not None
        text = ""
        while "Waiting" not in text:
            text += host.stdout.readline()
        (code,) = WORDS.findall(text)
        port = re.search(r"--host \S+?:(\d+)", text)  # unless it is the usual one
        where = Address("127.0.0.1", int(port[1]) if port else PAIRING_PORT)
        slot, first, second = code.split("-")
        for left in ("2 tries left", "One try left", "No tries left"):
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


def test_ctrl_c_ends_it_cleanly(pair_desk: Home, laptop: Home) -> None:
    """The code is dead at once, whoever is connected is told, and the exit code says why."""
    with started("pair", "--json", variables=at(pair_desk)) as host:
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
    pair_desk: Home, laptop: Home, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """That nobody can find it here, that a try failed, and who has joined."""
    opened: list[PairingListener] = []

    def listen() -> PairingListener:
        opened.append(PairingListener(port=0))
        return opened[0]

    def deaf(**_options: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr("potluck.apps.cli.pairing.open_listener", listen)
    monkeypatch.setattr("potluck.apps.cli.pairing.new_code", lambda *_: parse_code(CODE))
    monkeypatch.setattr("zeroconf.Zeroconf", deaf)
    hosting = Background(lambda: run(pair_desk, *options))
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
    with _Announcement() as voice:
        assert not voice.announce(parse_code(CODE), 1)


# --- in a terminal ---


def test_a_terminal_shows_the_time_that_is_left(pair_desk: Home) -> None:
    """Below the code, in one line that changes; without colours if none are wanted."""
    with on_screen("pair", variables=at(pair_desk, NO_COLOR="1")) as screen:
        screen.read_until("Valid for 4:5")
        assert "3 tries left" in screen.text
        assert WORDS.search(screen.text)
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", screen.raw)
        screen.type("\x03")
        assert screen.read_to_end() == 130


def test_joining_a_second_namespace_asks(pair_desk: Home, laptop: Home, tmp_path: Path) -> None:
    """The person sees who offers what, and may have both."""
    pair(Home(tmp_path, "nas"), laptop)
    before = laptop.namespace()
    with Hosting(pair_desk, namespace="lab") as hosting:
        options = ["pair", CODE, "--host", str(hosting.where)]
        with on_screen(*options, variables=at(laptop)) as screen:
            screen.read_until('Join "lab" instead? (y: yes, k: keep both, n: no)')
            assert f"with the id {pair_desk.me.node_id}" in screen.text
            screen.type("k\r")
            assert screen.read_to_end() == 0
        hosting.outcome.result()
    assert laptop.namespace() == before
    assert laptop.namespace("lab") == pair_desk.namespace("lab")


@pytest.mark.parametrize(
    ("answer", "code", "stays"), [("yes", 0, False), ("n", 1, True), ("", 1, True), ("?", 1, True)]
)
def test_only_yes_means_yes(
    pair_desk: Home, laptop: Home, tmp_path: Path, answer: str, code: int, stays: bool
) -> None:
    """Anything else leaves everything as it is, and the other machine is told."""
    nas = Home(tmp_path, "nas")
    pair(nas, laptop)
    with Hosting(pair_desk) as hosting:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("potluck.apps.cli.pairing.can_ask", lambda: True)
            result = run(laptop, CODE, "--host", str(hosting.where), typed=f"{answer}\n")
        assert result.exit_code == code, result.output
        if stays:
            with pytest.raises(PairingFailed, match="chose not to join"):
                hosting.outcome.result()
    assert laptop.namespace() == (nas if stays else pair_desk).namespace()


# --- questions that nobody can be asked ---


def test_a_script_has_to_say_what_it_wants(pair_desk: Home, laptop: Home, tmp_path: Path) -> None:
    """Found out before the code is used; then --yes leaves the old one and --keep keeps it."""
    nas = Home(tmp_path, "nas")
    pair(nas, laptop)
    with Hosting(pair_desk) as hosting:
        where = ["--host", str(hosting.where)]
        refused = run(laptop, CODE, *where)
        assert refused.exit_code == 1
        assert "Add --yes to leave it for the new one, or --keep" in refused.stderr
        assert hosting.failures == []
        kept = run(laptop, CODE, *where, "--keep")
        assert kept.exit_code == 0, kept.stderr
        assert 'It is still in "home"; choose between them with --namespace.' in kept.stdout
        assert 'Here it is called "home-2".' in kept.stdout
        assert "`potluck unpair home-2` leaves it." in kept.stdout
        assert f"with the id {pair_desk.me.node_id}" in kept.stdout
        hosting.outcome.result()
    assert laptop.namespace("home") == nas.namespace()
    assert laptop.namespace("home-2") == pair_desk.namespace()
    with Hosting(Home(tmp_path, "tower")) as hosting:
        left = run(laptop, CODE, "--host", str(hosting.where), "--yes")
        assert left.exit_code == 0, left.stderr
        assert 'It is still in "home-2"' in left.stdout
        assert "?" not in left.stdout  # nobody was asked
    assert laptop.namespace("home") not in {nas.namespace(), pair_desk.namespace()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "10.0.0.1"], "--host requires a CODE"),
        (["--yes"], "--yes requires a CODE"),
        ([CODE, "--yes", "--keep"], "cannot be combined"),
        ([CODE, "--host", "a b"], "is not an address"),
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


def test_a_code_that_fails_says_why_on_stderr_alone(pair_desk: Home, laptop: Home) -> None:
    """Also with --json: stdout stays clean for the program that reads it."""
    with Hosting(pair_desk, WRONG) as hosting:
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


# --------------------------------------------------------------------------------------------------
# ``potluck passphrase``: a group of all who know it, made from the command line.

PHRASE_WORDS = "anvil quartz lemming turbine saffron oboe gravel"


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
    first = command(
        tmp_path / "desk", "lab", "--stdin", "--json", typed=f"{PHRASE_WORDS} \r\nmore\n"
    )
    second = command(tmp_path / "laptop", "Lab", "--json", POTLUCK_PASSPHRASE=PHRASE_WORDS)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    told = [json.loads(each.stdout) for each in (first, second)]
    assert told[0] == told[1] == {"namespace": "lab", "tag": told[0]["tag"], "new": True}
    desk, laptop = (NetworkNamespace.load("lab", home=tmp_path / n) for n in ("desk", "laptop"))
    assert desk == laptop == NetworkNamespace.from_passphrase("lab", PHRASE_WORDS)
    assert desk.protection is Protection.PASSPHRASE
    assert PHRASE_WORDS.split(maxsplit=1)[0] not in (first.output + second.output)
    assert NetworkNamespace.load_or_create(home=tmp_path / "desk").name == "lab"  # it is used


def test_the_same_passphrase_again_changes_nothing(tmp_path: Path) -> None:
    """It says that this machine was in already."""
    command(tmp_path, "lab", POTLUCK_PASSPHRASE=PHRASE_WORDS)
    again = command(tmp_path, "lab", POTLUCK_PASSPHRASE=PHRASE_WORDS)
    assert again.exit_code == 0
    assert 'was already in "lab"' in flat(again.stdout)


def test_another_group_of_that_name_is_left_only_if_the_person_agrees(tmp_path: Path) -> None:
    """Its secret would be gone."""
    before = NetworkNamespace.generate("lab", home=tmp_path)
    before.save()
    before.mark_used()
    refused = command(tmp_path, "lab", POTLUCK_PASSPHRASE=PHRASE_WORDS)
    assert refused.exit_code == 1
    assert NetworkNamespace.load("lab", home=tmp_path) == before
    agreed = command(tmp_path, "lab", "--yes", POTLUCK_PASSPHRASE=PHRASE_WORDS)
    assert agreed.exit_code == 0
    assert NetworkNamespace.load("lab", home=tmp_path).protection is Protection.PASSPHRASE


@pytest.mark.parametrize(
    ("arguments", "typed", "variables", "code", "said"),
    [
        (["lab"], None, {}, 1, "--stdin, or in POTLUCK_PASSPHRASE"),
        (["lab", "--stdin"], "\n", {}, 2, "empty"),
        (["lab", "--stdin"], PHRASE_WORDS, {"POTLUCK_PASSPHRASE": PHRASE_WORDS}, 2, "use one"),
        (["lab", "--stdin"], "password1", {}, 1, "could be guessed"),
        (["open", "--stdin"], PHRASE_WORDS, {}, 1, "reserved"),
        (["a/b", "--stdin"], PHRASE_WORDS, {}, 1, "a/b"),
        ([], None, {}, 2, "GROUP"),
        (["lab", PHRASE_WORDS], None, {}, 2, "unexpected"),
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
    monkeypatch.setattr("potluck.apps.cli.membership.can_ask", lambda: True)
    result = command(
        tmp_path, "lab", typed=f"{PHRASE_WORDS}\nsomething else\n{PHRASE_WORDS}\n{PHRASE_WORDS}\n"
    )
    assert result.exit_code == 0, result.output
    assert "anvil" not in result.output
    assert "do not match" in result.output
    expected = NetworkNamespace.from_passphrase("lab", PHRASE_WORDS)
    assert NetworkNamespace.load("lab", home=tmp_path) == expected


# --------------------------------------------------------------------------------------------------
# ``potluck unpair``: a machine leaves, and is told what that does not do.


@pytest.fixture
def unpair_desk(tmp_path: Path) -> Home:
    """A machine in two namespaces: home with another, lab alone."""
    desk = Home(tmp_path, "desk")
    pair(desk, Home(tmp_path, "laptop"))
    desk.membership("lab")
    return desk


def unpair(home: Home, *arguments: str, **variables: str) -> Result:
    """Run the command on a machine."""
    environment = {"POTLUCK_HOME": str(home.path), "POTLUCK_NAMESPACE": None, **variables}
    return CliRunner().invoke(app, ["unpair", *arguments], env=environment)


def kept(home: Home) -> list[str]:
    """The namespaces of a machine."""
    return NamespaceNetworkNamespace.stored(home=home.path)


def test_leaving_forgets_secret_and_members_here(unpair_desk: Home) -> None:
    """The others still list it, and it says so; a namespace nobody joined needs no such words."""
    result = unpair(unpair_desk, "--yes")
    assert result.exit_code == 0
    assert 'This machine has left "home"' in result.stdout
    assert "The others still list it as a member" in result.stdout
    assert kept(unpair_desk) == ["lab"]
    assert "others" not in unpair(unpair_desk, "lab", "--yes").stdout
    assert kept(unpair_desk) == []


@pytest.mark.parametrize("way", ["argument", "option", "environment"])
def test_which_one_is_meant_can_be_said_in_three_ways(unpair_desk: Home, way: str) -> None:
    """By its place, by the option, by the environment."""
    arguments = {"argument": ["lab"], "option": ["--namespace", "lab"]}.get(way, [])
    variables = {"POTLUCK_NAMESPACE": "lab"} if way == "environment" else {}
    result = unpair(unpair_desk, *arguments, "--yes", "--json", **variables)
    assert json.loads(result.stdout) == {"left": "lab"}
    assert kept(unpair_desk) == ["home"]


def test_what_is_damaged_can_still_be_left(unpair_desk: Home) -> None:
    """It is the advice that the damage itself gives."""
    (unpair_desk.path / "namespaces" / "home" / "secret").write_bytes(b"half")
    assert unpair(unpair_desk, "home", "--yes").exit_code == 0
    assert kept(unpair_desk) == ["lab"]


def test_an_unknown_one_is_an_error(unpair_desk: Home) -> None:
    """With the names there are."""
    result = unpair(unpair_desk, "attic", "--yes")
    assert result.exit_code == 1
    assert "not in a group named 'attic'. Those it is in: home, lab." in result.stderr


def test_a_person_is_asked(unpair_desk: Home) -> None:
    """No means no."""
    variables = {"POTLUCK_HOME": str(unpair_desk.path), "POTLUCK_NAMESPACE": ""}
    with on_screen("unpair", variables=variables) as screen:
        screen.read_until('Leave "home"?')
        screen.type("n\r")
        assert screen.read_to_end() == 1
    assert kept(unpair_desk) == ["home", "lab"]
