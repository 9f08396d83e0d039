"""Jobs whose ranks are fixed by ``potluck run``: status, dashboard, metrics and trace show them."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import browser
from support.command import COMMAND, end_all, potluck, started
from support.hosts import Host, Hosts
from support.paired_hosts import pair, variables
from support.ports import free_port
from support.threads import PATIENCE, eventually

pytestmark = pytest.mark.slow

TRAIN = """
import sys, warnings
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import potluck.torch

torch.set_num_threads(1)
dist.init_process_group("potluck")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
is_over = torch.zeros(1)
while not is_over:
    model(torch.ones(8, 64)).square().mean().backward()
    is_over[0] = Path(sys.argv[1]).exists()
    dist.all_reduce(is_over)
print("trained", flush=True)
dist.destroy_process_group()
"""

ADD = """
import sys
from pathlib import Path
import numpy as np
from potluck import DistributedContext, TcpBackend

with DistributedContext(TcpBackend.from_env()) as context:
    while not context.all_reduce(float(Path(sys.argv[1]).exists())):
        context.all_reduce(np.ones(1000, np.float32))
"""

EXCHANGE = """
import sys, time
from pathlib import Path
from potluck import TcpBackend

with TcpBackend.from_env() as backend:
    while not Path(sys.argv[1]).exists():
        backend.barrier()
        time.sleep(0.05)
"""


def told(*arguments: str, variables: dict[str, str]) -> dict[str, Any] | None:
    """What ``potluck status`` says of the only job; None while there is none."""
    result = potluck("status", "--json", *arguments, variables=variables)
    jobs = json.loads(result.stdout)["jobs"] if result.stdout else []
    assert len(jobs) <= 1, jobs
    return jobs[0] if jobs else None


@contextlib.contextmanager
def two_workers(
    folder: Path, script: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A script with two workers here; it ends by itself when the file ``over`` is there."""
    (folder / "work.py").write_text(script)
    own = {"POTLUCK_HOME": str(folder / "home"), "POTLUCK_METRICS_PORT": str(free_port())}
    own |= {"POTLUCK_TRACE_DIR": str(folder / "traces")}
    arguments = ["run", "--nodes", "1", "--per-node", "2", str(folder / "work.py")]
    with started(*arguments, str(folder / "over"), variables=own) as run:
        yield run, own
        (folder / "over").touch()
        run.wait(PATIENCE)
        assert run.stderr is not None
        assert run.returncode == 0, run.stderr.read()


def test_a_group_over_tcp_is_seen_counted_and_traced_like_any_other(tmp_path: Path) -> None:
    """Both ranks with their places and figures; metrics over HTTP; a dump for the trace."""
    with two_workers(tmp_path, ADD) as (run, own):
        eventually(lambda: (job := told(variables=own)) is not None and len(job["nodes"]) == 2)
        job = told(variables=own)
        assert job is not None
        assert (job["job"], job["state"], job["epoch"]) == ("work.py", "active", 1)
        assert [node["rank"] for node in job["nodes"]] == [0, 1]
        assert len({node["pid"] for node in job["nodes"]}) == 2
        assert all(node["health"] == "healthy" for node in job["nodes"])
        assert all(node["figures"]["all_reduce.completed"] > 0 for node in job["nodes"])
        url = f"http://127.0.0.1:{own['POTLUCK_METRICS_PORT']}/metrics"
        page = urllib.request.urlopen(url, timeout=PATIENCE).read().decode()
        assert "potluck_view_members 2" in page
        assert "all_reduce" in page
        run.send_signal(signal.SIGUSR2)
        eventually(lambda: len(list((tmp_path / "traces").glob("*.jsonl"))) == 2)
    summary = json.loads(
        potluck("trace", "--json", "-o", str(tmp_path / "t.json"), variables=own).stdout
    )
    assert len(summary["ranks"]) == 2
    assert summary["missing"] == []
    assert summary["operations"] > 0


def test_a_group_that_only_exchanges_messages_is_seen_too(tmp_path: Path) -> None:
    """Nothing but the backend itself; when it is over, nothing is seen any more."""
    with two_workers(tmp_path, EXCHANGE) as (_, own):
        eventually(lambda: (job := told(variables=own)) is not None and len(job["nodes"]) == 2)
    assert told("--wait", "1", variables=own) is None


@contextlib.contextmanager
def running(folder: Path, host: Host, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A command on a host; it is gone at the end, and whatever it started as well."""
    with subprocess.Popen(
        host.command([str(COMMAND), *command]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables(folder, host),
    ) as process:
        try:
            yield process
        finally:
            end_all(process.pid)


@pytest.mark.netns
@pytest.mark.timeout(6 * PATIENCE)  # three times PyTorch is imported, with all that replicas need
def test_a_pytorch_job_on_three_machines_is_on_the_dashboard(tmp_path: Path) -> None:
    """The documented three lines: no warning is written, and page and command show all ranks."""
    if shutil.which("chromium") is None:
        pytest.skip("the browser is Debian's package chromium")
    script, over = tmp_path / "train.py", tmp_path / "over"
    script.write_text(TRAIN)
    with Hosts("desk laptop attic") as hosts, contextlib.ExitStack() as stack:
        desk, laptop, attic = hosts.values()
        pair(tmp_path, desk, laptop)
        pair(tmp_path, desk, attic)
        runs = [
            stack.enter_context(running(tmp_path, host, "run", str(script), str(over)))
            for host in hosts.values()
        ]
        shown = stack.enter_context(running(tmp_path, attic, "dashboard", "--json"))
        assert shown.stdout is not None
        page = stack.enter_context(browser(attic.command)).page()
        page.look(1280, 1400)
        page.open(json.loads(shown.stdout.readline())["url"])
        healthy = "document.querySelectorAll('#graph .node[data-status=healthy]').length"
        page.wait_for(f"{healthy} === 3", within=4 * PATIENCE)
        page.wait_for("document.querySelectorAll('#throughput .curve').length === 3")
        assert page.complaints == []
        (tmp_path / "page.png").write_bytes(page.picture(whole=True))
        text = page.text()
        assert all(name in text for name in hosts)
        status = subprocess.run(
            laptop.command([str(COMMAND), "status", "--json"]),
            env=variables(tmp_path, laptop),
            capture_output=True,
            check=True,
            text=True,
        )
        (job,) = json.loads(status.stdout)["jobs"]
        assert sorted(node["name"] for node in job["nodes"]) == ["attic", "desk", "laptop"]
        assert [node["rank"] for node in job["nodes"]] == [0, 1, 2]
        assert all(node["figures"]["all_reduce.completed"] > 0 for node in job["nodes"])
        over.touch()
        said = [run.communicate(timeout=2 * PATIENCE) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], said
    for output, complaints in said:
        assert "trained" in output
        assert "Warning" not in complaints
        assert "socket.cpp" not in complaints
