"""A peer whose name is an attack: in logs, traces and the dashboard it is plain text on one line.

The peer is a real process that runs the library with another card; what reads its name are the
commands and pages that people use.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from potluck.apps.cli.main import app
from potluck.cluster import node
from potluck.cluster.reports import Journal, StatusReport, write
from support import traces
from support.browser import browser
from support.clusters import clusters, new_job
from support.command import environment
from support.threads import PATIENCE, eventually
from support.web import dashboard

EVIL = (
    "\x1b]52;c;cm0=\x07\x1b[2J\r\nForged: all is well\u202e\u2066\x9b31m\x00\u2028"
    "<img src=x onerror=owned=1><script>owned=1</script>[/bold]"
)

JOIN = """
import sys
import potluck
from msgspec.structs import replace
from potluck.cluster import node as cluster_node
from potluck.trust.roster_records import NAME_LIMIT

job, name, dump = sys.argv[1:]
if name:
    make = cluster_node.make_card
    evil = bytes.fromhex(name).decode()
    cluster_node.make_card = lambda *given: replace(make(*given), name=evil[:NAME_LIMIT])
options = dict(multicast=False, known=False, solo_delay=0.2, timeout=30)
with potluck.join(3, job=job, **options) as cluster:
    cluster.barrier()
    if dump:
        cluster.dump_trace(dump)
    cluster.barrier()
"""


def is_plain(text: str) -> bool:
    """Whether nothing in a text steers what shows it: no controls, no change of direction."""
    return all(unicodedata.category(letter) not in {"Cc", "Cf", "Zl", "Zp"} for letter in text)


def texts_in(value: Any) -> Iterator[str]:
    """Every text in what JSON holds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.items() for each in item for text in texts_in(each))
    elif isinstance(value, list):
        yield from (text for each in value for text in texts_in(each))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two that meet a hostile process have logged here, one for people and one for programs."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "join.py").write_text(JOIN, encoding="utf-8")
    job, home = new_job(), {"POTLUCK_HOME": str(folder / "home")}
    everybody = {
        "hostile": ([EVIL.encode().hex(), ""], {}),
        "people": (["", "people.trace.jsonl"], {"POTLUCK_LOG": "debug"}),
        "programs": (["", ""], {"POTLUCK_LOG": "json,debug"}),
    }
    processes = {}
    for who, (arguments, variables) in everybody.items():
        with (folder / f"{who}.log").open("w") as log:
            command = [sys.executable, "join.py", job, *arguments]
            given = environment({**home, **variables})
            processes[who] = subprocess.Popen(command, stderr=log, cwd=folder, env=given)
    try:
        for who, process in processes.items():
            assert process.wait(2 * PATIENCE) == 0, (folder / f"{who}.log").read_text()
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return folder


def lines_of(log: Path) -> list[str]:
    """The lines of a log, as they were written; the name of the peer is in one of them."""
    lines = log.read_bytes().decode().removesuffix("\n").split("\n")
    assert any("Forged: all is well" in line for line in lines)
    return lines


def test_the_name_of_a_peer_is_plain_text_in_logs_and_traces(folder: Path) -> None:
    """Each event stays one line of ours; so do the commands that read the trace."""
    for line in lines_of(folder / "people.log"):
        assert re.match(r"\d\d:\d\d:\d\d \w+ \w+: ", line), ascii(line)
        assert is_plain(line), ascii(line)
    assert_trace_is_plain(folder / "people.trace.jsonl", folder)


def test_the_same_in_json(folder: Path) -> None:
    """Every line is one object, and no text in it steers a terminal."""
    for line in lines_of(folder / "programs.log"):
        assert is_plain(line), ascii(line)
        assert all(map(is_plain, texts_in(json.loads(line)))), ascii(line)


def assert_trace_is_plain(dump: Path, folder: Path) -> None:
    """What ``potluck trace`` prints and writes."""
    timeline = folder / "timeline.json"
    for options in ([], ["--json"]):
        shown = CliRunner().invoke(app, ["trace", str(dump), "-o", str(timeline), *options])
        assert shown.exit_code == 0, shown.output
        assert all(map(is_plain, shown.output.split("\n"))), ascii(shown.output)
    assert all(map(is_plain, texts_in(json.loads(timeline.read_text()))))


def test_the_dump_of_another_machine_is_plain_text(tmp_path: Path) -> None:
    """Every text of it, in the summary and in the timeline."""
    header = traces.header_of(0, name=EVIL, host=EVIL, process=EVIL, machine=EVIL)
    record = traces.collective(0, 1, 1.0, 2.0, what=EVIL, group=EVIL, error=EVIL)
    dump = traces.write(tmp_path / "theirs.trace.jsonl", header, [record])
    assert_trace_is_plain(dump, tmp_path)


def lie(message: Any) -> bytes:
    """What a hostile member reports in place of this."""
    if isinstance(message, StatusReport):
        members = [replace(each, name=EVIL) for each in message.members]
        peers = [replace(each, name=EVIL, reason=EVIL, address=EVIL) for each in message.peers]
        facts = {EVIL: EVIL, "script": EVIL}
        message = replace(message, name=EVIL, host=EVIL, reason=EVIL, version=EVIL, facts=facts)
        message = replace(message, members=members, peers=peers)
    if isinstance(message, Journal):
        events = [replace(each, text=EVIL) for each in message.events]
        epochs = [replace(each, reason=EVIL) for each in message.epochs]
        message = replace(message, events=events, epochs=epochs)
    return write(message)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's package chromium")
def test_the_dashboard_shows_it_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """No element, no script and no control character comes from a member."""
    job = new_job()
    with clusters(2, job), browser() as chromium:
        monkeypatch.setattr(node, "write", lie)
        with dashboard(job) as served:
            page = chromium.page()
            page.look(1280, 900)
            page.open(served.url)
            page.wait_for("document.body?.innerText.includes('Forged: all is well')")
            page.wait_for("document.querySelectorAll('#events li, #epochs li').length > 0")
            eventually(lambda: "<script>owned=1</script>" in page.text())
            assert page.value("typeof owned") == "undefined"
            assert page.value("document.querySelectorAll('[onerror], [src=x]').length") == 0
            scripts = "[...document.scripts].filter((each) => !each.src).length"
            assert page.value(scripts) == 0
            for text in page.value(TEXTS):
                assert is_plain(text.replace("\n", " ").replace("\t", " ")), ascii(text)
            assert page.complaints == []


TEXTS = """[...document.querySelectorAll("*")].flatMap((each) => [
    ...[...each.attributes].map((one) => one.value),
    ...[...each.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data)])"""
