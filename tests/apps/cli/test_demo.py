"""``potluck demo`` as people and programs meet it: whole runs with real processes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from potluck.apps.cli.main import app
from support.command import children_of, environment, is_gone, on_screen, potluck, started
from support.threads import PATIENCE, eventually

PAIR = ("demo", "--nodes", "2")
BROKEN = """
import os, sys
if "potluck.apps.cli.demo_node" in sys.orig_argv:
    raise ImportError("this numpy is broken")
sys.path.remove(os.path.dirname(__file__))
del sys.modules["numpy"]
import numpy
"""
"""A module that hides numpy from nodes, and from no other process."""

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of three nodes, one of which is killed, reports to a program."""
    home, temporary = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("temporary")
    own = {"POTLUCK_HOME": str(home), "TMPDIR": str(temporary), "POTLUCK_NAMESPACE": "mine"}
    result = subprocess.run(
        [sys.executable, "-m", "potluck", "demo", "--json", "--steps", "24"],
        capture_output=True,
        check=False,
        env=environment(own),
        text=True,
        timeout=2 * PATIENCE,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert not list(home.iterdir()), "a demo touches nothing of its user's"
    assert not list(temporary.iterdir()), "and leaves nothing behind"
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def nodes_of(demo: int) -> list[int]:
    """The processes of its nodes, once both are there.

    Not sooner: the demo waits for a child that has not begun its own program yet, whatever happens.
    """
    eventually(lambda: [*map(is_node, children_of(demo))] == [True, True])
    return children_of(demo)


def is_node(pid: int) -> bool:
    """Whether a child is a node already, and not still a copy of its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "potluck.apps.cli.demo_node" in psutil.Process(pid).cmdline()
    return False


def say_all_gone(pids: list[int]) -> None:
    """Fail if one of these processes is still there after a while."""
    eventually(lambda: all(map(is_gone, pids)), within=10)


# --- what happens ---


def test_every_survivor_notices_the_killed_node(report: dict[str, Any]) -> None:
    """In the words of the log, and each by itself."""
    killed = report["killed"]
    assert killed["rank"] == 2
    assert killed["step"] >= 6
    assert sorted([killed["name"], *(each["name"] for each in report["noticed"])]) == sorted(
        report["nodes"]
    )
    assert all(0 < each["milliseconds"] < 15_000 for each in report["noticed"])
    assert all(killed["name"] in each["sentence"] for each in report["noticed"])


def test_the_survivors_continue_in_another_view(report: dict[str, Any]) -> None:
    """Agreed before the next step, and no step is missing or made twice."""
    agreed, resumed = report["agreed"], report["resumed"]
    assert agreed["epoch"] == 2
    assert report["noticed"][0]["milliseconds"] < agreed["milliseconds"] < resumed["milliseconds"]
    assert resumed["step"] > report["killed"]["step"]
    steps = [step for step, _ in report["losses"]["story"]]
    assert steps == list(range(1, report["story"]["steps"] + 1))


def test_the_killed_node_comes_back_and_catches_up(report: dict[str, Any]) -> None:
    """It gets the others' state and trains with them to the end."""
    back, killed = report["returned"], report["killed"]
    assert back["name"] == killed["name"]
    assert back["pid"] != killed["pid"]
    assert back["epoch"] > report["agreed"]["epoch"]
    assert back["step"] >= report["resumed"]["step"]
    assert back["state_bytes"] > 500_000
    assert report["story"]["steps"] >= back["step"] + 3


def test_the_result_is_that_of_an_undisturbed_run(report: dict[str, Any]) -> None:
    """The same bits on every node, the same loss within noise, every sample counted once."""
    for run in (report["story"], report["undisturbed"]):
        assert sorted(run["fingerprints"]) == sorted(report["nodes"])
        assert len(set(run["fingerprints"].values())) == 1
        assert run["missing_samples"] == 0
    assert report["story"]["steps"] == report["undisturbed"]["steps"]
    assert report["difference"] <= report["noise"]
    losses = [loss for _, loss in report["losses"]["story"]]
    assert losses[-1] < losses[0]
    assert (report["held"], report["problems"]) == (True, [])
    assert report["averaged_bytes"] > 0


def test_the_figures_of_the_curve_are_those_of_the_report(report: dict[str, Any]) -> None:
    """Each run ends with the loss that the report tells."""
    for run in ("story", "undisturbed"):
        assert report["losses"][run][-1] == [report[run]["steps"], report[run]["loss"]]


def test_no_process_is_left(report: dict[str, Any]) -> None:
    """Three were started, and one of them again."""
    assert len(set(report["pids"])) == 4
    assert all(map(is_gone, report["pids"]))


@pytest.mark.parametrize(
    "arguments", [["--nodes", "1"], ["--kill", "3"], ["--kill", "-1"], ["--steps", "0"]]
)
def test_impossible_wishes_are_wrong_usage(arguments: list[str]) -> None:
    """Nothing is started for them."""
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.stderr


# --- how it looks ---


def test_a_terminal_gets_a_live_view() -> None:
    """Drawn again and again, within its width; of two nodes the leader may be killed."""
    wishes = ("--nodes", "2", "--kill", "0", "--steps", "8")
    with on_screen("demo", *wishes, size=(80, 30)) as screen:
        assert screen.read_to_end(2 * PATIENCE) == 0, screen.text
    text = screen.text
    assert len(re.findall(r"rank +node +state", text)) > 10
    assert re.search(r"– +\w+ +killed ", text)
    assert re.search(r"– +\w+ +starting ", text)
    figures = r"\d+ +\d+ +\d+\.\d MB +\d+\.\d MB/s +\d+\.\d ms"
    assert re.search(rf"\d +\w+ +training +healthy +{figures}", text)
    assert re.search(r"undisturbed +[▁▂▃▄▅▆▇█]+ +0\.\d{4}", text)
    assert "bit for bit" in text
    assert COLOUR.search(screen.raw)
    assert [line for line in re.split(r"[\r\n]+", text) if len(line) > 80] == []
    assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")  # the cursor is back


def test_a_pipe_gets_plain_lines() -> None:
    """No escape sequence reaches a file."""
    wishes = ("--nodes", "2", "--no-kill", "--steps", "16")
    result = potluck("demo", *wishes)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert not any("\x1b" in line for line in lines)
    assert any("found each other and train together" in line for line in lines)
    pattern = r" +\d+\.\d\d s    step \d+, loss 0\.\d+, 2 of 2 nodes, .* averaged"
    assert any(re.fullmatch(pattern, line) for line in lines)
    assert lines[-1].startswith("Both nodes have the same parameters, bit for bit")
    assert "killed" not in result.stdout


# --- how it ends early ---


def test_ctrl_c_leaves_nothing_behind() -> None:
    """The key reaches the demo alone, which ends its nodes; the cursor comes back."""
    with on_screen(*PAIR) as screen:
        screen.read_until("starting")
        nodes = nodes_of(screen.process.pid)
        screen.type("\x03")
        assert screen.read_to_end() == 130
        say_all_gone(nodes)
    assert screen.text.endswith("Interrupted.\r\n")
    assert "Traceback" not in screen.text
    assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_nothing_behind(ending: signal.Signals, code: int, tmp_path: Path) -> None:
    """Also that of a lost connection by SSH; a node that sleeps ends all the same."""
    with started(*PAIR, variables={"TMPDIR": str(tmp_path)}) as demo:
        nodes = nodes_of(demo.pid)
        psutil.Process(nodes[1]).suspend()
        demo.send_signal(ending)
        assert demo.wait(20) == code
        say_all_gone(nodes)
    assert not list(tmp_path.iterdir())


def test_a_node_that_ends_unasked_ends_the_demo() -> None:
    """The demo says which node, how it ended and in one paragraph, instead of hanging."""
    with started(*PAIR) as demo:
        nodes = nodes_of(demo.pid)
        os.kill(nodes[1], signal.SIGTERM)
        _, words = demo.communicate(timeout=20)
        assert demo.returncode == 1
        say_all_gone(nodes)
    assert f"potluck: The demo's node thyme (pid {nodes[1]}) ended unexpectedly" in words
    assert "signal SIGTERM" in words


def test_a_node_that_cannot_start_shows_its_traceback_first(tmp_path: Path) -> None:
    """Then the paragraph."""
    (tmp_path / "numpy.py").write_text(BROKEN)
    result = potluck(*PAIR, variables={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    *trace, paragraph = result.stderr.splitlines()
    assert trace[0].startswith("Traceback")
    assert "ImportError: this numpy is broken" in trace
    assert paragraph.startswith("potluck: The demo's node ")
    assert "exit code 1" in paragraph


def test_a_demo_that_takes_too_long_gives_up() -> None:
    """And says what it waited for."""
    result = potluck(*PAIR, "--seconds", "1")
    assert result.returncode == 1
    # How far it gets within a second depends on the machine.
    waited = r"(basil|thyme|basil and thyme) did not (find the others|train) within"
    assert re.search(waited, result.stderr), result.stderr


def test_a_reader_that_goes_away_ends_the_demo() -> None:
    """`potluck demo | head -1` stops when nobody reads any more, quietly."""
    with started(*PAIR) as demo:
        nodes = nodes_of(demo.pid)
        assert demo.stdout is not None
        demo.stdout.readline()
        demo.stdout.close()
        assert demo.stderr is not None
        assert "Traceback" not in demo.stderr.read()
        assert demo.wait(20) == 1
        say_all_gone(nodes)
