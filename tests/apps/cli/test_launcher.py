"""Who is here for a run: counting, comparing, and beginning together."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import msgspec
import pytest

from potluck.apps.cli import launcher
from potluck.apps.cli.launcher import LauncherWait, differences, labels
from potluck.apps.cli.run_places import BEGINNING, Participants
from potluck.cluster.reports import StatusReport
from support.clusters import new_job
from support.command import children_of, is_gone, on_screen, started
from support.threads import PATIENCE, eventually

FACTS = {
    "script_sha256": "aa11",
    "arguments": "--epochs 3",
    "python": "3.12.1",
    "potluck": "0.1.0",
    "numpy": "2.1.0",
}


def report(
    name: str, state: str = "waiting", *, role: str = "launcher", **facts: str
) -> StatusReport:
    """What a machine says."""
    return StatusReport(
        node=name[0] * 32,
        incarnation=1 if role == "launcher" else 2,
        name=name,
        role=role,
        state=state,
        facts={**FACTS, **facts},
    )


def gathering(wanted: int = 3) -> LauncherWait:
    """Of the machine "desk" in a group of three."""
    expected = {"d" * 32: "desk", "l" * 32: "laptop", "a" * 32: "attic"}
    return LauncherWait(report("desk"), wanted, expected)


def test_who_is_here_and_who_is_missing_is_said_in_one_line() -> None:
    """The line names everybody, ourselves first."""
    one = gathering()
    assert one.status_line() == "1 of 3 is here: desk; missing: attic, laptop"
    one.look([report("laptop")])
    assert one.status_line() == "2 of 3 are here: desk, laptop; missing: attic"
    one.look([report("laptop"), report("attic")])
    assert one.status_line() == "3 of 3 are here: desk, attic, laptop"
    assert one.is_complete


def test_nobody_begins_before_everybody_knows_that_all_are_here() -> None:
    """Whoever begins ends its launcher, and the others would wait for it."""
    one = gathering(2)
    one.look([report("laptop", "waiting")])
    assert one.is_complete
    assert not one.may_start
    one.look([report("laptop", "ready")])
    assert one.may_start


def test_a_launcher_that_has_begun_counts_until_its_script_is_seen() -> None:
    """Between the two there is nobody who could answer."""
    one = gathering(2)
    one.look([report("laptop", "starting")])
    one.look([])
    assert one.may_start
    one.look([report("laptop", "joining", role="member")])
    assert len(one.here) == 2


def test_a_machine_that_comes_late_joins_those_who_run() -> None:
    """Scripts that run count like launchers that are ready; observers do not count."""
    one = gathering(3)
    one.look([report("laptop", "active", role="member"), report("xray", role="observer")])
    assert not one.is_complete
    one.look([report(name, "active", role="member") for name in ("laptop", "attic")])
    assert one.may_start


def test_who_differs_is_named_with_what_it_has() -> None:
    """The majority comes first; only different scripts keep a run from beginning."""
    found = differences(
        [
            report("desk"),
            report("attic"),
            report("laptop", script_sha256="bb22", numpy="1.26.0"),
        ]
    )
    assert [str(each) for each in found] == [
        "The script on laptop differs from the one on attic, desk",
        "The version of numpy is not the same everywhere (attic, desk: 2.1.0; laptop: 1.26.0)",
    ]
    assert [each.is_grave for each in found] == [True, False]
    assert differences([report("desk"), report("attic")]) == []


def test_several_processes_of_one_machine_can_be_told_apart() -> None:
    """Three terminals have one name; the port says which is meant, also of who differs."""
    here = [
        msgspec.structs.replace(report("desk"), incarnation=number, port=52415 + number)
        for number in (1, 2)
    ]
    here.append(msgspec.structs.replace(report("laptop", arguments=""), port=52416))
    assert list(labels(here).values()) == ["desk:52416", "desk:52417", "laptop"]
    (found,) = differences(here)
    assert str(found) == (
        "The arguments are not the same everywhere "
        "(desk:52416, desk:52417: --epochs 3; laptop: none)"
    )


def test_who_works_on_another_job_is_not_here() -> None:
    """An address that is remembered or given may lead to it; it counts neither way."""
    one = gathering(2)
    one.look([msgspec.structs.replace(report("laptop", script_sha256="cc33"), job="other.py")])
    assert one.status_line() == "1 of 2 is here: desk; missing: attic, laptop"
    assert one.differences == []


def test_a_machine_that_is_heard_of_later_is_waited_for_too() -> None:
    """It was paired with another one, whose roster we get when we meet."""
    one = LauncherWait(report("desk"), 2, {"d" * 32: "desk", "l" * 32: "laptop"})
    one.look([report("laptop", "ready")])
    assert one.may_start
    one.expect({"d" * 32: "desk", "l" * 32: "laptop", "a" * 32: "attic"}, wants_all=True)
    assert not one.may_start
    assert one.status_line() == "2 of 3 are here: desk, laptop; missing: attic"


# --------------------------------------------------------------------------------------------------
# Several workers of one machine: their lines, their signals, and what becomes of the others.

PLACES = """
import json, os, signal
os.kill(os.getpid(), signal.SIGUSR2)  # asks for a dump before there is any
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"
print(json.dumps({name: os.environ[name] for name in [*names.split(), "POTLUCK_PORT"]}))
"""

# The second waits until the first is gone, and only then fails for a reason of its own.
HEARSAY = """
import os, pathlib, sys, time

class PeerLost(Exception):
    pass

note = pathlib.Path(sys.argv[1])
if os.environ["LOCAL_RANK"] == "0":
    note.with_suffix(".tmp").write_text(str(os.getpid()))
    note.with_suffix(".tmp").rename(note)
    raise PeerLost("Rank 1 (desk) is gone")
while not note.exists() or pathlib.Path("/proc", note.read_text(), "exe").is_symlink():
    time.sleep(0.01)
try:
    {}["weights"]
except KeyError:
    raise ValueError("the real reason")
"""

FAIL_AND_STAY = """
import os, signal, sys, time
if os.environ["LOCAL_RANK"] == "1":
    sys.exit(5)
{}
time.sleep(60)
"""

WAIT = """
import os, signal, time
{}
print("ready", os.getpid(), flush=True)
time.sleep(60)
"""

IGNORE = "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)"


def script(folder: Path, text: str) -> str:
    """A script in a file."""
    file = folder / "train.py"
    file.write_text(text)
    return str(file)


def workers(count: int) -> list[dict[str, str]]:
    """Environments of so many."""
    return [{**os.environ, "LOCAL_RANK": str(n), "RANK": str(n + 4)} for n in range(count)]


def test_launchers_give_their_workers_ranks_that_fit_together(tmp_path: Path) -> None:
    """Two terminals with two workers and one; each line says whose it is."""
    job, file = new_job(), script(tmp_path, PLACES)
    options = ("run", "--nodes", "2", "--job", job)
    with (
        started(*options, "--per-node", "2", file) as pair,
        started(*options, file) as single,
    ):
        many, one = (run.communicate(timeout=PATIENCE) for run in (pair, single))
        assert (pair.returncode, single.returncode) == (0, 0), (many, one)
    lines = [line.partition(" ") for line in many[0].splitlines()]
    places = [json.loads(rest) for _, _, rest in lines]
    assert {label for label, _, _ in lines} == {f"[{place['RANK']}]" for place in places}
    places.append(json.loads(one[0]))
    places.sort(key=lambda place: int(place["RANK"]))
    assert [place["RANK"] for place in places] == ["0", "1", "2"]
    assert {place["WORLD_SIZE"] for place in places} == {"3"}
    by_group = [(place["GROUP_RANK"], place["LOCAL_RANK"]) for place in places]
    assert by_group in (
        [("0", "0"), ("0", "1"), ("1", "0")],
        [("0", "0"), ("1", "0"), ("1", "1")],
    )
    assert {place["MASTER_ADDR"] for place in places} == {"127.0.0.1"}
    assert len({place["MASTER_PORT"] for place in places}) == 1
    assert len({place["POTLUCK_PORT"] for place in places}) == 3


def test_the_first_real_reason_is_shown_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not that of a worker that only heard of it, though that one ended earlier."""
    file = script(tmp_path, HEARSAY)
    code = launcher.run_workers([file, str(tmp_path / "note")], workers(2), Participants("desk"))
    notes = capfd.readouterr().err
    assert code == 1
    *_, story, end = notes.rstrip().split("\n\n")
    assert end == "potluck: desk: rank 5: ValueError: the real reason"
    assert story.splitlines()[-1] == "ValueError: the real reason"
    assert "\nKeyError: 'weights'\n\nDuring handling" in notes.partition("reason\n\n")[2]
    assert "[4] PeerLost: Rank 1 (desk) is gone" in notes


def test_who_only_heard_of_a_failure_points_to_the_other_machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody here is to blame; the traceback names who is."""
    monkeypatch.setattr(launcher, "HEARSAY", 0.2)
    text = "class PeerLost(Exception): pass\nraise PeerLost('Rank 9 (attic) is gone')"
    assert launcher.run_workers([script(tmp_path, text)], workers(2), Participants("desk")) == 1
    *_, story, end = capfd.readouterr().err.rstrip().split("\n\n")
    assert story.endswith("PeerLost: Rank 9 (attic) is gone")
    assert end == "potluck: desk: a rank on another machine failed first: look at its output"


def test_who_failed_but_does_not_end_is_blamed_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback is the real one, though those who only heard of it ended earlier."""
    monkeypatch.setattr(launcher, "HEARSAY", 0.5)
    note = tmp_path / "note"
    text = (
        "import os, pathlib, sys, threading, time\n"
        f"note = pathlib.Path({str(note)!r})\n"
        "if os.environ['RANK'] == '5':\n"
        "    late = lambda: (time.sleep(0.2), note.touch(), time.sleep(60))\n"
        "    threading.Thread(target=late).start()\n"
        "    raise ValueError('the real reason')\n"
        "while not note.exists():\n"
        "    time.sleep(0.01)\n"
        "raise RuntimeError('Rank 5 (desk) is gone')"
    )
    assert launcher.run_workers([script(tmp_path, text)], workers(2), Participants("desk")) == 1
    *_, story, end = capfd.readouterr().err.rstrip().split("\n\n")
    assert story.splitlines()[-1] == "ValueError: the real reason"
    assert end == (
        "potluck: desk: rank 5: ValueError: the real reason; it failed, and had to be ended"
    )


@pytest.mark.parametrize(
    ("machines", "leaves", "reason"),
    [
        ("1", "5", "rank 5 ended without an error while others still needed it"),
        ("2", "5", "rank 5 ended without an error while others still needed it, or a rank on"),
        ("1", "", "each that failed tells of another: look at what came before"),
    ],
)
def test_who_left_without_an_error_is_named_to_those_who_miss_it(
    machines: str,
    leaves: str,
    reason: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a single machine there is no other one to look at."""
    monkeypatch.setattr(launcher, "HEARSAY", 0.2)
    text = (
        f"import os\nif os.environ['RANK'] == {leaves!r}: raise SystemExit\n"
        "raise RuntimeError('Rank 5 (desk) is gone')"
    )
    places = [{**each, "GROUP_WORLD_SIZE": machines} for each in workers(2)]
    assert launcher.run_workers([script(tmp_path, text)], places, Participants("desk")) == 1
    end = capfd.readouterr().err.rstrip().split("\n\n")[-1]
    assert end.startswith(f"potluck: desk: {reason}")


@pytest.mark.parametrize("manners", ["", IGNORE], ids=["ends when asked", "ignores everything"])
def test_when_one_fails_the_others_are_ended(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    manners: str,
) -> None:
    """Asked first, then killed; the exit code is that of the one that failed."""
    monkeypatch.setattr(launcher, "GRACE", 0.2)
    file = script(tmp_path, FAIL_AND_STAY.format(manners))
    assert launcher.run_workers([file], workers(3), Participants("desk")) == 5
    end = capfd.readouterr().err.splitlines()[-1]
    assert end == (
        "potluck: desk: rank 5: failed with exit code 5; 2 of the other 2 workers had to be ended"
    )


def test_a_worker_that_is_killed_is_named_with_the_signal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is no traceback then, only what it said last; and the memory tells why, perhaps."""
    text = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '4':\n"
        "    print('out of memory', file=sys.stderr, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "time.sleep(60)"
    )
    code = launcher.run_workers([script(tmp_path, text)], workers(2), Participants("desk"))
    assert code == 128 + signal.SIGKILL
    notes = capfd.readouterr().err
    assert "\nout of memory\n" in notes
    assert re.search(
        r"\npotluck: desk: rank 4: killed by SIGKILL; it used up to \d.* of .* GB were free", notes
    )


def test_signals_reach_all_workers(tmp_path: Path) -> None:
    """They may save their work; the command ends as a shell would say it."""
    file = script(tmp_path, WAIT.format(""))
    options = ("run", "--nodes", "1", "--per-node", "2", "--job", new_job())
    with started(*options, file) as process:
        assert process.stdout is not None
        lines = sorted(process.stdout.readline() for _ in range(2))
        assert [line.split()[:2] for line in lines] == [["[0]", "ready"], ["[1]", "ready"]]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
        _, notes = process.communicate()
    assert ": ended by SIGTERM\n" in notes
    assert all(is_gone(int(line.split()[2])) for line in lines)


def test_in_a_terminal_lines_have_colours_and_the_second_ctrl_c_kills(tmp_path: Path) -> None:
    """The first may be ignored, or take long; nobody is left behind."""
    file = script(tmp_path, WAIT.format(IGNORE))
    options = ("run", "--nodes", "1", "--per-node", "2", "--job", new_job())
    with on_screen(*options, file) as screen:
        for rank in ("0", "1"):
            screen.read_until(f"[{rank}] ready")
        assert "\x1b[36m[0] \x1b[0mready" in screen.raw
        assert "\x1b[33m[1] \x1b[0mready" in screen.raw
        running = children_of(screen.process.pid)

        def has_ended() -> bool:  # one that comes before the last was looked at counts for nothing
            screen.type("\x03")
            return screen.process.poll() is not None

        eventually(has_ended)
        # A shell shows both alike; the other is one more that came when all was over.
        assert screen.read_to_end() in {128 + signal.SIGINT, -signal.SIGINT}
        eventually(lambda: all(map(is_gone, running)))


def test_a_second_ctrl_c_cuts_the_goodbye_short_without_a_traceback(tmp_path: Path) -> None:
    """What a script does at its end may take long; Python would show where it was."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import atexit, time\nimport potluck\n"
        "atexit.register(lambda: [print('leaving', flush=True), time.sleep(60)])\n"
        "print('begun', flush=True)\ntime.sleep(60)\n"
    )
    with on_screen("run", "--nodes", "1", "--job", new_job(), str(script)) as screen:
        screen.read_until("begun")
        screen.type("\x03")
        screen.read_until("leaving")
        screen.type("\x03")
        assert screen.read_to_end() == 130
    assert "Traceback" not in screen.text
    assert "KeyboardInterrupt" not in screen.text
    assert "interrupted by Ctrl-C, slow.py:" in screen.text


def test_output_without_an_end_of_line_and_progress_bars_come_through(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each state of a bar is a line; what is not text is shown as well as possible."""
    text = (
        "import sys; sys.stdout.write('10%\\r20%\\nlast'); sys.stdout.flush(); "
        "sys.stdout.buffer.write(b'\\xff')"
    )
    assert launcher.run_workers([script(tmp_path, text)], workers(2), Participants("desk")) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[4]")]
    assert lines == ["[4] 10%", "[4] 20%", "[4] last\ufffd"]


LEAVES_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("started", child.pid, flush=True)
{}
"""


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("end", "expected"),
    [("", 0), ("os.kill(os.getpid(), 9)", 137), ("sys.exit(5)", 5)],
    ids=["ends", "is killed", "fails"],
)
def test_what_a_script_has_started_does_not_outlive_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], end: str, expected: int, count: int
) -> None:
    """However it ends, and whether or not it has the terminal for its own."""
    file = script(tmp_path, LEAVES_A_CHILD.format(end))
    assert launcher.run_workers([file], workers(count), Participants("desk")) == expected
    started = [line.split()[-1] for line in capfd.readouterr().out.splitlines()]
    assert started
    # The system ends a process a moment after it was told to; by itself it would stay a minute.
    eventually(lambda: all(is_gone(int(pid)) for pid in started), within=20)


SAYS_WHY = """
import sys
import potluck  # noqa
def deep():
    raise {}
deep()
"""


def test_an_error_is_told_in_one_line_with_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The traceback stays as Python writes it; what steers a terminal does not reach the line."""
    file = script(tmp_path, SAYS_WHY.format(r"ValueError('bad \x1b[2J batch\nsecond line')"))
    assert launcher.run_workers([file], workers(1), Participants("desk")) == 1
    notes = capfd.readouterr().err.splitlines()
    assert notes[0] == BEGINNING
    assert notes[-1] == "potluck: desk: ValueError: bad  [2J batch, train.py:5"
    assert sum("Traceback" in line for line in notes) == 1


def test_a_traceback_that_only_tells_of_another_rank_is_shown_if_no_machine_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is all there is; with a line that names what was lost."""
    file = script(tmp_path, SAYS_WHY.format("potluck.PeerLost('Rank 1 (attic) is gone')"))
    assert launcher.run_workers([file], workers(1), Participants("desk")) == 1
    notes = capfd.readouterr().err.strip().splitlines()
    assert notes[0] == BEGINNING
    assert notes[-1] == "potluck: desk: PeerLost: Rank 1 (attic) is gone, train.py:5"


def test_processes_that_the_script_starts_do_not_speak_for_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They inherit its environment, and may fail without the script failing."""
    text = (
        "import subprocess, sys\n"
        "code = 'import potluck; raise ValueError(1)'\n"
        "subprocess.run([sys.executable, '-c', code])\n"
        "sys.exit(4)"
    )
    assert launcher.run_workers([script(tmp_path, text)], workers(1), Participants("desk")) == 4
    notes = capfd.readouterr().err.splitlines()
    assert notes[0] == BEGINNING
    assert notes[-1] == "potluck: desk: failed with exit code 4"


def test_a_deadline_ends_the_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also one that ignores being asked."""
    file = script(tmp_path, WAIT.format(IGNORE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "GRACE", 0.2)
        code = launcher.run_workers(
            [file], workers(1), Participants("desk"), deadline=time.monotonic() + 0.5, patience=0.5
        )
    assert code == launcher.TOO_LATE
    notes = capfd.readouterr().err.splitlines()
    assert notes == ["potluck: desk: --timeout ended it after 0.5 s; its script was still running"]
