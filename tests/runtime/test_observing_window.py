"""A window: the dashboard beside a run, in a process of its own that never outlives it."""

from __future__ import annotations

import importlib.util
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

import potluck
from potluck.errors import BackendUnavailable
from potluck.runtime.auto_config import AutoDiscoveryConfig
from potluck.runtime.observing_window import Window, errand_for, find_web_server, place_of
from support.clusters import join, new_job
from support.threads import PATIENCE, eventually
from support.web import Stream, ask, connect


def children() -> set[int]:
    """Processes that this one has started."""
    return {each.pid for each in psutil.Process().children() if "dashboard" in str(each.cmdline())}


def test_a_run_shows_itself_and_its_window_ends_with_it(tmp_path: Path) -> None:
    """Of a namespace that no file of this machine keeps as well; the secret is in no argument."""
    namespace = potluck.NetworkNamespace.generate("attic", home=tmp_path)
    before, job = children(), new_job()
    with join(1, job, namespace=namespace, dashboard=0) as cluster:
        assert cluster.dashboard_url is not None
        port = int(cluster.dashboard_url.rstrip("/").rpartition(":")[2])
        with Stream(port) as stream:
            shown = stream.next("whole", "light")[2]
            while not shown.get("jobs"):
                shown = stream.next("light")[2]
        assert [job["job"] for job in shown["jobs"]] == [job]
        assert shown["namespace"] == "attic"
        (pid,) = children() - before
        assert not any(namespace.secret.hex() in each for each in psutil.Process(pid).cmdline())
        assert ask(port, "/").status == 200
    assert children() == before
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def test_a_window_ends_when_its_run_is_killed() -> None:
    """Its standard input ends then, whatever happened."""
    program = (
        "import sys, time, potluck\n"
        "cluster = potluck.join(1, job=sys.argv[1], multicast=False, known=False,\n"
        "    solo_delay=0.1, dashboard=0)\n"
        "print(cluster.dashboard_url, flush=True)\n"
        "time.sleep(60)\n"
    )
    with psutil.Popen([sys.executable, "-c", program, new_job()], stdout=-1, text=True) as run:
        assert run.stdout.readline().startswith("http://127.0.0.1:")
        (window,) = run.children()
        run.send_signal(signal.SIGKILL)
        run.wait(PATIENCE)
        eventually(lambda: not window.is_running() or window.status() == psutil.STATUS_ZOMBIE)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is looked for, and the node that asked is closed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else find(name)
    )
    with pytest.raises(BackendUnavailable, match=r"no uvicorn.*pip install 'potluck\[dashboard\]'"):
        find_web_server()
    with pytest.raises(BackendUnavailable, match="pip install"):
        join(1, new_job(), dashboard=True)


def test_a_place_that_cannot_be_had_is_an_error() -> None:
    """With the cause, from the other process."""
    busy = connect_listener()
    port = busy.getsockname()[1]
    namespace = potluck.NetworkNamespace.load_or_create()
    config = AutoDiscoveryConfig(job=new_job(), multicast=False, known=False)
    window = Window(errand_for(port, config, namespace, 1))
    try:
        with pytest.raises(BackendUnavailable, match=f"port {port}"):
            window.wait()
    finally:
        window.close()
        window.close()
        busy.close()


def connect_listener() -> socket.socket:
    """Somebody else's port."""
    return socket.create_server(("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        (True, ("127.0.0.1", None)),
        (8000, ("127.0.0.1", 8000)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("desk.local", ("desk.local", None)),
        ("::1", ("::1", None)),
        ("[::]:80", ("::", 80)),
    ],
)
def test_places_can_be_said_in_several_ways(
    wanted: bool | int | str, place: tuple[str, int | None]
) -> None:
    """A port, an address, or both."""
    assert place_of(wanted) == place
