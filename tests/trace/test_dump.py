"""Dumps of the flight recorder: whole or not at all, few, private, and where the error says."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from potluck import CollectiveMismatch, DistributedContext, PeerLost, SimulatedBackend, Timeout
from potluck.errors import DistributedError, SelfSend, ViewChanged
from potluck.trace import dump
from potluck.trace.dump import FOLDER_VARIABLE, SUFFIX, mention, trace_folder
from potluck.trace.dump import dump as files_dump
from potluck.trace.recorder import Label, Recorder, Track
from support.clusters import clusters, everywhere
from support.threads import together


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where dumps go."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "traces"))
    return tmp_path / "traces"


def filled() -> Recorder:
    """A recorder that has something to tell."""
    recorder = Recorder()
    recorder.rank, recorder.world_size = 1, 2
    recorder.append(("step", 1.0, 2.0, 7, 0, 0, Label(Track.TRAINING, rank=1), None, None))
    return recorder


def test_a_dump_is_a_header_and_one_line_for_each_operation(folder: Path) -> None:
    """Lines of JSON, the first with the format's version and both clocks."""
    path = files_dump(filled(), reason="a test wants it")
    assert path.parent == folder
    assert path.name.endswith(SUFFIX)
    header, record = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert (header["potluck_trace"], header["rank"], header["pid"]) == (1, 1, os.getpid())
    assert header["reason"] == "a test wants it"
    assert header["monotonic"] < header["wall"]
    assert (record["what"], record["number"], record["lane"]) == ("step", 7, "training")


def test_a_dump_is_private_and_leaves_nothing_else_behind(folder: Path) -> None:
    """Names of machines and functions are in it; a half-written one never is."""
    path = files_dump(filled(), reason="")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == [path]


def test_only_the_newest_dumps_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that loses a member every minute does not fill the disk."""
    monkeypatch.setattr(dump, "KEPT", 3)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    old = folder / f"20200101T000000-desk-1{SUFFIX}"
    old.write_text("")
    paths = [files_dump(filled(), reason="") for _ in range(4)]
    assert not old.exists()
    assert sum(path.exists() for path in paths) == 3
    assert (folder / "notes.txt").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With what to do about it; nothing is left there."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DistributedError, match=r"could not be written.*POTLUCK_TRACE_DIR"):
        files_dump(filled(), tmp_path / "file" / "x.jsonl", reason="")


def test_without_the_variable_dumps_go_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And with an empty one nowhere."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    assert trace_folder() == tmp_path / "traces"
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert trace_folder() is None
    error = PeerLost("gone")
    recorder = filled()
    recorder.is_automatic = True
    mention(recorder, error)
    assert error.trace is None


@pytest.mark.parametrize(
    "error",
    [PeerLost("gone", hint="Look."), CollectiveMismatch("differ"), Timeout("late", seconds=1)],
)
def test_an_error_says_where_what_came_before_is(folder: Path, error: DistributedError) -> None:
    """In a note, once; its text stays the same on all ranks."""
    recorder, text = filled(), str(error)
    mention(recorder, error)
    mention(recorder, error)
    (path,) = folder.iterdir()
    assert error.trace == str(path)
    told = f"The trace of this process is in {path}; `potluck trace` shows it."
    assert error.__notes__ == [told]
    assert str(error) == text
    assert json.loads(path.read_text().splitlines()[0])["reason"].startswith(error.message)


@pytest.mark.parametrize("error", [ViewChanged("others"), SelfSend(1), ValueError("x")])
def test_what_needs_no_explanation_leaves_no_dump(folder: Path, error: Exception) -> None:
    """A change in good order, or a mistake in the call itself."""
    mention(filled(), error)
    assert not folder.exists()


def test_many_errors_of_one_cause_share_a_dump(folder: Path) -> None:
    """A hundred works that fail at once do not write a hundred files."""
    recorder = filled()
    errors = [PeerLost("gone") for _ in range(100)]
    for error in errors:
        mention(recorder, error)
    assert len({error.trace for error in errors}) == len(list(folder.iterdir())) == 1


def test_a_disk_that_is_full_does_not_hide_the_error(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error stays what it was; the log says what could not be written."""
    folder.write_text("no folder")
    error = PeerLost("gone")
    mention(filled(), error)
    assert (error.trace, error.hint) == (None, None)
    assert "could not be written" in caplog.text


def test_a_lost_rank_leaves_a_dump_on_each_of_the_others(folder: Path) -> None:
    """The failed operation is in it, and every rank's error names its own file."""
    backends = SimulatedBackend.create_group(3)
    contexts = [DistributedContext(each) for each in backends]
    together(*(context.barrier for context in contexts))
    backends[2].lose()

    def told(context: DistributedContext) -> str:
        with pytest.raises(PeerLost) as caught:
            context.barrier()
        assert caught.value.trace is not None
        assert any(caught.value.trace in note for note in caught.value.__notes__)
        return caught.value.trace

    paths = together(*(lambda each=each: told(each) for each in contexts[:2]))
    assert len(set(paths)) == 2
    for path in paths:
        last = json.loads(Path(path).read_text().splitlines()[-1])
        assert (last["outcome"], last["error"], last["number"]) == ("failed", "PeerLost", 2)
    for context in contexts:
        context.close()


def test_a_program_may_ask_for_a_dump(tmp_path: Path) -> None:
    """Of a cluster it tells process, job, view and members, and events with their sentences."""
    with clusters(2) as nodes:
        everywhere(nodes, lambda node: node.barrier())
        paths = everywhere(nodes, lambda node: node.dump_trace(tmp_path / f"{node.rank}.jsonl"))
    lines = [list(map(json.loads, path.read_text().splitlines())) for path in paths]
    for rank, (header, *records) in enumerate(lines):
        assert header["rank"] == rank
        assert header["job"].startswith("test-")
        assert header["process"] in header["views"][header["view"]]
        barrier = next(each for each in records if each["what"] == "barrier")
        assert barrier["view"] == header["view"]
        views = [each for each in records if each["what"].startswith("view ")]
        assert "with 2 members" in views[-1]["reason"]
    assert lines[0][0]["views"] == lines[1][0]["views"]


# --------------------------------------------------------------------------------------------------
# Dumps without a call: by a signal, and by the error that ends a program.

PROGRAM = """
import os, signal, sys, potluck
{before}
context = potluck.DistributedContext(potluck.SimulatedBackend.create_group(1)[0])
context.barrier()
{after}
"""


def run(folder: Path, before: str, after: str) -> subprocess.CompletedProcess[str]:
    """A program with one rank that has done one barrier."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before, after=after)],
        env={**os.environ, "POTLUCK_TRACE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="there is no such signal here")
def test_the_signal_writes_a_dump_and_the_program_goes_on(tmp_path: Path) -> None:
    """It says where; the exit code is the program's own."""
    kill = "os.kill(os.getpid(), signal.SIGUSR2); print('on'); context.close()"
    ended = run(tmp_path, "", kill)
    assert (ended.returncode, ended.stdout) == (0, "on\n")
    (path,) = tmp_path.iterdir()
    assert f"the trace of rank 0 is in {path}" in ended.stderr
    header, record = map(json.loads, path.read_text().splitlines())
    assert header["reason"] == "it was requested with SIGUSR2"
    assert record["what"] == "barrier"


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="there is no such signal here")
def test_a_handler_of_the_programs_own_stays(tmp_path: Path) -> None:
    """A library takes nobody's signal away."""
    own = "signal.signal(signal.SIGUSR2, lambda *_: print('mine'))"
    ended = run(tmp_path, own, "os.kill(os.getpid(), signal.SIGUSR2); context.close()")
    assert ended.stdout == "mine\n"
    assert list(tmp_path.iterdir()) == []


def test_the_error_that_ends_a_program_leaves_a_dump(tmp_path: Path) -> None:
    """The traceback is as ever; before it one line says where to look."""
    ended = run(tmp_path, "", "context.close(); raise KeyError('butter')")
    assert ended.returncode == 1
    assert "KeyError: 'butter'" in ended.stderr
    (path,) = tmp_path.iterdir()
    assert f"the trace of rank 0 is in {path}; `potluck trace` shows it" in ended.stderr
    header = json.loads(path.read_text().splitlines()[0])
    assert header["reason"] == "the program ended by KeyError: 'butter'"


def test_a_program_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    """Whatever its exit code: that is not an error."""
    assert run(tmp_path, "", "context.close(); sys.exit(3)").returncode == 3
    assert list(tmp_path.iterdir()) == []
