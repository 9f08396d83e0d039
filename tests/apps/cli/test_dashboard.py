"""``potluck dashboard``: says where it is, serves until it is told to end, and needs its extra."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck.apps.cli.main import app
from support.clusters import new_job
from support.command import started
from support.threads import PATIENCE
from support.web import Stream, ask


def port_of(url: str) -> int:
    """Where to ask."""
    return int(url.partition("/?")[0].rstrip("/").rpartition(":")[2])


def test_the_command_serves_until_it_is_interrupted() -> None:
    """The first line says where, for programs; the exit code is that of a success."""
    with started("dashboard", "--json", "--port", "0", "--job", new_job()) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert ask(port_of(told["url"]), "/api/picture").json()["namespace"] == told["namespace"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        process.communicate()


def test_from_elsewhere_it_takes_the_token_that_is_printed() -> None:
    """A person reads the address and what it means."""
    with started("dashboard", "--host", "0.0.0.0", "--port", "0", "--job", new_job()) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        while not lines[-1].startswith("Anyone with this address can see the dashboard"):
            lines.append(process.stdout.readline())
        assert lines[0].startswith("Dashboard of ")
        url = lines[1].strip()
        assert ask(port_of(url)).status == 401
        assert ask(port_of(url), "/?" + url.partition("?")[2]).status == 303
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE)[1] == ""
        assert process.returncode == 0


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also for ``potluck run --serve``, before anybody is waited for."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "starlette" else find(name)
    )
    (tmp_path / "train.py").write_text("print('never')")
    for line in (["dashboard"], ["run", "--serve", "--nodes", "5", str(tmp_path / "train.py")]):
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 1
        assert "pip install 'potluck[dashboard]'" in result.stderr
        assert "This is a fault" not in result.stderr


def test_a_run_can_be_looked_at_while_it_runs(tmp_path: Path) -> None:
    """The dashboard ends with it."""
    (tmp_path / "train.py").write_text(
        "import sys, potluck\n"
        "with potluck.join(timeout=30) as cluster:\n"
        "    print(cluster.world_size, flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    job = new_job()
    options = ("--json", "--serve-at", "127.0.0.1:0", "--nodes", "1", "--job", job)
    with started("run", *options, str(tmp_path / "train.py")) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        url = ""
        while not url:
            url = json.loads(process.stderr.readline()).get("dashboard", "")
        assert process.stdout.readline() == "1\n"
        with Stream(port_of(url)) as stream:
            picture = stream.next("whole")[2]
            while not picture.get("jobs"):
                picture = stream.next("light")[2]
        assert picture["jobs"][0]["job"] == job
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
