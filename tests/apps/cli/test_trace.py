"""``potluck trace`` as a person runs it: on dumps of real ranks, and on files that are none."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from potluck import DistributedContext, PeerLost, SimulatedBackend
from potluck.apps.cli.main import app
from support.command import potluck
from support.threads import Background, together
from support.traces import collective, header_of, write


def make_dumps(folder: Path) -> None:
    """Two ranks reduce, one sends to the other; then one is lost."""
    backends = SimulatedBackend.create_group(2)
    contexts = [DistributedContext(each) for each in backends]

    def work(context: DistributedContext) -> None:
        context.all_reduce(np.ones(1000, np.float32))
        if context.rank:
            context.recv(np.empty(100, np.uint8), 0)
        else:
            context.send(np.zeros(100, np.uint8), 1)

    together(*(lambda each=each: work(each) for each in contexts))
    contexts[1].dump_trace(folder / "1.trace.jsonl")
    backends[1].lose()
    with pytest.raises(PeerLost):
        contexts[0].barrier()
    contexts[0].dump_trace(folder / "0.trace.jsonl")
    for context in contexts:
        context.close()


def test_dumps_of_all_ranks_become_a_timeline_and_a_summary(tmp_path: Path) -> None:
    """Perfetto gets the file; the terminal says what failed and why."""
    make_dumps(tmp_path)
    ended = potluck("trace", str(tmp_path), "-o", str(tmp_path / "t.json"))
    assert (ended.returncode, ended.stderr) == (0, "")
    first, whose = ended.stdout.splitlines()[:2]
    assert re.fullmatch(r"Dumps from \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: .*\.", first), first
    assert whose.startswith("5 operations of rank 0"), whose
    assert "1 operation failed:" in ended.stdout
    assert "barrier 2 on rank 0: " in ended.stdout
    assert "ui.perfetto.dev" in ended.stdout
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"M", "X", "s", "f"} <= {event["ph"] for event in events}
    assert {event["name"] for event in events if event["ph"] == "X"} >= {
        "all_reduce 1",
        "barrier 2",
        "send",
        "recv",
    }


def test_a_damaged_dump_costs_nothing_of_the_others(tmp_path: Path) -> None:
    """It is named, with the reason; the exit code says that something is missing."""
    write(tmp_path / "0.trace.jsonl", header_of(0, world_size=1), [collective(0, 1, 1.0, 2.0)])
    (tmp_path / "1.trace.jsonl").write_bytes(b"\x00garbage")
    words = ["trace", str(tmp_path), "-o", str(tmp_path / "t.json"), "--json"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 3
    facts = json.loads(ended.stdout)
    assert facts["operations"] == 1
    (trouble,) = facts["troubles"]
    assert "1.trace.jsonl is not a trace file" in trouble
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert any(event["name"] == "all_reduce 1" for event in events)


def test_without_arguments_the_last_incident_is_shown(tmp_path: Path) -> None:
    """The dumps of this machine's own folder; and the timeline can go to a pipe."""
    variables = {"POTLUCK_TRACE_DIR": str(tmp_path)}
    nothing = potluck("trace", variables=variables)
    assert nothing.returncode == 1
    assert f"There is no dump to show in {tmp_path}" in nothing.stderr
    write(tmp_path / "0.trace.jsonl", header_of(0, world_size=1), [collective(0, 1, 1.0, 2.0)])
    ended = potluck("trace", "-o", "-", variables=variables)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["traceEvents"]
    assert "No rank kept the others waiting noticeably." in ended.stderr


def test_a_device_is_written_to_and_a_link_is_not_followed(tmp_path: Path) -> None:
    """Who throws the timeline away does not lose the place where things are thrown away."""
    write(tmp_path / "0.trace.jsonl", header_of(0, world_size=1), [collective(0, 1, 1.0, 2.0)])
    pipe, victim, output = tmp_path / "pipe", tmp_path / "victim", tmp_path / "t.json"
    os.mkfifo(pipe)
    victim.write_text("dear")
    output.symlink_to(victim)
    reading = Background(pipe.read_text)
    assert CliRunner().invoke(app, ["trace", str(tmp_path), "-o", str(pipe)]).exit_code == 0
    assert json.loads(reading.result())["traceEvents"]
    assert pipe.is_fifo()
    assert CliRunner().invoke(app, ["trace", str(tmp_path), "-o", str(output)]).exit_code == 0
    assert victim.read_text() == "dear"
    assert json.loads(output.read_text())["traceEvents"]
    assert {each.name for each in tmp_path.iterdir()} == {
        "0.trace.jsonl",
        "pipe",
        "victim",
        "t.json",
    }


def test_a_place_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    """Not a traceback, and no half-written file."""
    write(tmp_path / "0.trace.jsonl", header_of(0), [])
    ended = CliRunner().invoke(app, ["trace", str(tmp_path), "-o", str(tmp_path / "no" / "t")])
    assert ended.exit_code == 1
    assert "could not be written" in ended.stderr
    assert "Traceback" not in ended.stderr


SCRIPT = """
import os, pathlib, signal, time, potluck
folder = pathlib.Path(os.environ["POTLUCK_TRACE_DIR"])
os.kill(os.getpid(), signal.SIGUSR2)  # too early: there is nothing to write yet
with potluck.join(multicast=False, known=False, solo_delay=0.0, timeout=30) as cluster:
    cluster.barrier()
    os.kill(os.getppid(), signal.SIGUSR2)
    while not list(folder.glob("*.trace.jsonl")):  # the launcher hands the signal on
        time.sleep(0.01)
    cluster.barrier()
raise KeyError("butter")
"""


def test_a_run_writes_dumps_by_signal_and_by_its_last_error(tmp_path: Path) -> None:
    """The signal goes through the launcher; both times stderr says where, and trace reads them."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables = {"POTLUCK_HOME": str(tmp_path / "home")}
    ended = potluck("run", "--nodes", "1", str(script), variables=variables)
    assert ended.returncode == 1
    assert "KeyError: 'butter'" in ended.stderr
    traces = tmp_path / "home" / "traces"
    assert f"the trace of rank 0 is in {traces}" in ended.stderr
    assert f"the trace of rank 0 is in {traces}" in ended.stderr
    shown = potluck("trace", "-o", str(tmp_path / "t.json"), "--json", variables=variables)
    facts = json.loads(shown.stdout)
    assert (facts["missing"], facts["failed"], facts["troubles"]) == ([], [], [])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names == ["barrier 1", "barrier 2"]  # of two dumps, each once
