"""Dumps of the flight recorder: whole or not at all, few, private, and where the error says."""

import json
import os
import stat
from pathlib import Path

import pytest

from potluck import CollectiveMismatch, DistributedContext, PeerLost, SimulatedBackend, Timeout
from potluck.errors import DistributedError, SelfSend, ViewChanged
from potluck.runtime import recorder_files
from potluck.runtime.recorder import Label, Lane, Recorder
from potluck.runtime.recorder_files import FOLDER_VARIABLE, SUFFIX, dump, mention, trace_folder
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
    recorder.append(("step", 1.0, 2.0, 7, 0, 0, Label(Lane.TRAINING, rank=1), None, None))
    return recorder


def test_a_dump_is_a_header_and_one_line_for_each_operation(folder: Path) -> None:
    """Lines of JSON, the first with the format's version and both clocks."""
    path = dump(filled(), reason="a test wants it")
    assert path.parent == folder
    assert path.name.endswith(SUFFIX)
    header, record = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert (header["potluck_trace"], header["rank"], header["pid"]) == (1, 1, os.getpid())
    assert header["reason"] == "a test wants it"
    assert header["monotonic"] < header["wall"]
    assert (record["what"], record["number"], record["lane"]) == ("step", 7, "training")


def test_a_dump_is_private_and_leaves_nothing_else_behind(folder: Path) -> None:
    """Names of machines and functions are in it; a half-written one never is."""
    path = dump(filled(), reason="")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == [path]


def test_only_the_newest_dumps_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that loses a member every minute does not fill the disk."""
    monkeypatch.setattr(recorder_files, "KEPT", 3)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    old = folder / f"20200101T000000-desk-1{SUFFIX}"
    old.write_text("")
    paths = [dump(filled(), reason="") for _ in range(4)]
    assert not old.exists()
    assert sum(path.exists() for path in paths) == 3
    assert (folder / "notes.txt").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With what to do about it; nothing is left there."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DistributedError, match=r"could not be written.*POTLUCK_TRACE_DIR"):
        dump(filled(), tmp_path / "file" / "x.jsonl", reason="")


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
    told = f"What came before is in {path}; `potluck trace` shows it."
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
    """The error stays what it was; the log says what could not be kept."""
    folder.write_text("no folder")
    error = PeerLost("gone")
    mention(filled(), error)
    assert (error.trace, error.hint) == (None, None)
    assert "could not be kept" in caplog.text


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
