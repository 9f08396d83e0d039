"""``potluck demo`` as people and programs meet it: whole runs with real processes."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from potluck.apps.cli.main import app
from support.command import children_of, is_gone, on_screen, potluck, started
from support.threads import eventually

SHORT = ("demo", "--seconds", "1")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What a run of four ranks reports to a program."""
    result = potluck(*SHORT, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def ranks_of(demo: int) -> list[int]:
    """The processes of its ranks, once all four are there."""
    eventually(lambda: len(children_of(demo)) == 4)
    return children_of(demo)


def await_training(demo: subprocess.Popen[str]) -> None:
    """Read until it tells of a step."""
    assert demo.stdout is not None
    assert demo.stderr is not None
    for line in demo.stdout:
        if "step" in line:
            return
    pytest.fail(f"the demo ended early: {demo.stderr.read()}")


def say_all_gone(pids: list[int]) -> None:
    """Fail if one of these processes is still there after a while."""
    eventually(lambda: all(map(is_gone, pids)), within=10)


# --- the story ---


def test_training_works(report: dict[str, Any]) -> None:
    """The loss falls, before the kill and after it, and steps are counted once."""
    steps = [step for step, _ in report["losses"]]
    losses = [loss for _, loss in report["losses"]]
    at_kill = max(index for index, step in enumerate(steps) if step <= report["resumed_step"])
    assert losses[0] > losses[at_kill] > losses[-1]
    assert steps == sorted(set(steps))
    assert report["steps"] == steps[-1] > report["resumed_step"] >= report["killed"]["step"] > 0


def test_every_survivor_names_the_killed_rank(report: dict[str, Any]) -> None:
    """Also the one that was not its neighbour; the text is what a user would read."""
    assert report["killed"]["rank"] == 3
    assert [notice["rank"] for notice in report["noticed"]] == [0, 1, 2]
    assert all(notice["text"].startswith("Rank 3 ") for notice in report["noticed"])
    assert all("killed" in notice["text"] for notice in report["noticed"])
    assert all(notice["milliseconds"] > 0 for notice in report["noticed"])


def test_the_survivors_end_with_the_same_bits(report: dict[str, Any]) -> None:
    """Data parallel training keeps the replicas equal, across the loss of one."""
    assert sorted(report["fingerprints"]) == ["0", "1", "2"]
    assert len(set(report["fingerprints"].values())) == 1
    assert report["identical"] is True
    assert report["messages"] > 0
    assert report["bytes_sent"] > 0


def test_no_process_is_left(report: dict[str, Any]) -> None:
    """Four were started, none remains."""
    assert len(set(report["pids"])) == 4
    assert all(map(is_gone, report["pids"]))


@pytest.mark.parametrize(("ranks", "victim"), [(3, 0), (2, 1)])
def test_any_rank_can_be_killed(ranks: int, victim: int) -> None:
    """Rank 0 is nothing special, and of two ranks one goes on alone."""
    counts = ("--ranks", str(ranks), "--kill", str(victim), "--seconds", "0.6")
    report = json.loads(potluck("demo", *counts, "--json").stdout)
    others = [rank for rank in range(ranks) if rank != victim]
    assert [notice["rank"] for notice in report["noticed"]] == others
    assert all(notice["text"].startswith(f"Rank {victim} ") for notice in report["noticed"])
    assert report["identical"] is True
    assert report["steps"] > report["resumed_step"]


@pytest.mark.parametrize(
    "arguments", [["--ranks", "1"], ["--kill", "4"], ["--kill", "-1"], ["--seconds", "0"]]
)
def test_impossible_wishes_are_wrong_usage(arguments: list[str]) -> None:
    """Nothing is started for them."""
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.stderr


# --- how it looks ---


def test_a_pipe_gets_plain_lines() -> None:
    """No escape sequence reaches a file, and every act of the story is a line."""
    lines = potluck("demo", "--seconds", "2.4").stdout.splitlines()
    assert not any("\x1b" in line for line in lines)
    assert any(re.match(r"  step +\d+  loss 0\.\d+  4 of 4 train ", line) for line in lines)
    assert any(re.fullmatch(r"Rank 3 \(pid \d+\) is killed at step \d+\.", line) for line in lines)
    assert any("PeerLost: Rank 3 " in line for line in lines)
    assert any(line.startswith("A new group of ranks 0, 1, 2 goes on") for line in lines)
    assert lines[-1].startswith("All survivors hold the same parameters, bit for bit")


def test_a_terminal_gets_a_live_table() -> None:
    """The table is drawn again and again, with a line for each rank that fits the width."""
    with on_screen(*SHORT, size=(80, 24)) as screen:
        assert screen.read_to_end() == 0
    assert screen.text.count("messages/s") > 5
    assert re.search(r"3 +\d+ +killed +\d+ ", screen.text)
    assert re.search(
        r"0 +\d+ +training +\d+ +0\.\d+ +\d+\.\d MB +[\d,]+ +\d+\.\d MB/s", screen.text
    )
    assert re.search(r"0 +\d+ +done ", screen.text)
    assert "bit for bit" in screen.text
    assert COLOUR.search(screen.raw)
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]+", screen.text))
    assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")  # the cursor is back


def test_no_color_means_no_colour() -> None:
    """The table is the same, only plain."""
    with on_screen("demo", "--seconds", "0.5", variables={"NO_COLOR": "1"}) as screen:
        assert screen.read_to_end() == 0
    assert "messages/s" in screen.text
    assert not COLOUR.search(screen.raw)


def test_a_terminal_that_cannot_move_its_cursor_gets_lines() -> None:
    """TERM=dumb, as in an editor's shell."""
    with on_screen("demo", "--seconds", "0.5", variables={"TERM": "dumb"}) as screen:
        assert screen.read_to_end() == 0
    assert "\x1b" not in screen.raw
    assert "is killed at step" in screen.text


# --- how it ends early ---


def test_ctrl_c_leaves_nothing_behind() -> None:
    """The key reaches the demo alone, which ends its ranks; the cursor comes back."""
    with on_screen("demo") as screen:
        screen.read_until("training")
        ranks = ranks_of(screen.process.pid)
        screen.type("\x03")
        assert screen.read_to_end() == 130
        say_all_gone(ranks)
    assert screen.text.endswith("Interrupted.\r\n")
    assert "Traceback" not in screen.text
    assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    ("ending", "code", "training"),
    [
        (signal.SIGINT, 130, False),
        (signal.SIGTERM, 143, False),
        (signal.SIGKILL, -9, True),
    ],
)
def test_a_signal_leaves_nothing_behind(
    ending: signal.Signals, code: int, training: bool, tmp_path: Path
) -> None:
    """Whether the demo can still say so or not, its ranks end with it, also while they start."""
    # What a demo that is killed cannot remove any more goes with the test's own folder.
    with started("demo", variables={"TMPDIR": str(tmp_path)}) as demo:
        ranks = ranks_of(demo.pid)
        if training:
            await_training(demo)
        demo.send_signal(ending)
        assert demo.wait(20) == code
        say_all_gone(ranks)
    assert ending == signal.SIGKILL or not list(tmp_path.iterdir())


def test_a_rank_that_ends_unasked_ends_the_demo() -> None:
    """The demo says which rank, how it ended and in one paragraph, instead of hanging."""
    with started("demo") as demo:
        await_training(demo)
        ranks = ranks_of(demo.pid)
        os.kill(ranks[1], signal.SIGTERM)
        _, words = demo.communicate(timeout=20)
        assert demo.returncode == 1
        say_all_gone(ranks)
    assert words.startswith(f"potluck: Rank 1 of the demo (pid {ranks[1]}) is gone")
    assert "ended by the signal SIGTERM" in words
    assert words.count("\n") == 1


def test_a_rank_that_cannot_start_is_explained(tmp_path: Path) -> None:
    """The last words of the process are in the error."""
    (tmp_path / "numpy.py").write_text("raise ImportError('this numpy is broken')")
    result = potluck("demo", variables={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    assert "exit code 1 and wrote: ImportError: this numpy is broken" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_goes_away_ends_the_demo() -> None:
    """`potluck demo | head -1` stops when nobody reads any more, quietly."""
    with started("demo") as demo:
        ranks = ranks_of(demo.pid)
        assert demo.stdout is not None
        demo.stdout.readline()
        demo.stdout.close()
        assert demo.stderr is not None
        assert "Traceback" not in demo.stderr.read()
        assert demo.wait(20) == 1
        say_all_gone(ranks)


def test_a_rank_that_sleeps_is_ended_too() -> None:
    """A suspended process can do nothing for itself; the demo ends it all the same."""
    with started("demo") as demo:
        ranks = ranks_of(demo.pid)
        psutil.Process(ranks[2]).suspend()
        demo.send_signal(signal.SIGINT)
        assert demo.wait(20) == 130
        say_all_gone(ranks)
