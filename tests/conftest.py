"""What holds for every test: examples that repeat in CI, no skips there, and no thread left behind.

This file imports nothing of the project and nothing of ``tests/support``: its own tests
(``tests/test_conftest.py``) run it in an empty folder.
"""

import functools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

IN_CI = os.environ.get("CI") == "true"

# Ranks of one machine would leave TCP for local sockets, but what has to be right between machines
# is the sealed TCP connection: it is what the tests go over, unless they ask for the shortcut (or
# somebody runs them all with POTLUCK_SHORTCUTS=on).
os.environ.setdefault("POTLUCK_SHORTCUTS", "off")

# A failure prints the line that repeats it.  There are no deadlines per example: this suite shares
# its cores with real processes, and pytest's own timeout ends what hangs.
settings.register_profile("dev", deadline=None, print_blob=True)
# In CI one commit has one verdict: the same examples every time.
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
# `make test` tries fewer; `make test-all` tries as many as Hypothesis does by itself.  Whether a
# test wastes its inputs is judged there: from 25 examples that would be a matter of luck.
settings.register_profile(
    "quick",
    deadline=None,
    print_blob=True,
    derandomize=IN_CI,
    max_examples=25,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile("soak", deadline=None, print_blob=True, max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))


# --- under CI=true a skip is a failure ---


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that was skipped has not shown anything; in CI that is red."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a file that skips itself as a whole."""
    report = yield
    if IN_CI and report.outcome == "skipped":
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"Under CI=true a skip is a failure.  {reason}"


# --- tests that need network namespaces ---


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked ``netns`` where namespaces cannot be made, and say why."""
    if item.get_closest_marker("netns") is not None:
        reason = _why_no_namespaces()
        if reason is not None:
            pytest.skip(reason)


@functools.cache
def _why_no_namespaces() -> str | None:
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (Debian: iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"potluck-probe-{os.getpid()}"  # root inside a container may still lack the right
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=True)
    return None


# --- a home of their own ---


@pytest.fixture(scope="session", autouse=True)
def home_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keys and secrets of the tests never touch those of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POTLUCK_HOME", str(tmp_path_factory.mktemp("potluck-home")))
        patch.delenv("POTLUCK_NAMESPACE", raising=False)
        yield


# --- no test is silenced by another ---


@pytest.fixture(autouse=True)
def logs_begin_anew() -> Iterator[None]:
    """What one test has configured, or has logged so often that it is left out, ends with it."""
    yield
    logs = sys.modules.get("potluck.logs")
    if logs is not None:
        logs.begin_anew()


# --- no thread outlives its test ---

GRACE = 2.0  # seconds for a thread that has been told to end


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Fail the test that leaves a thread of ours, or one that would keep the process alive."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE
    for thread in threading.enumerate():
        if thread not in before and (not thread.daemon or thread.name.startswith("potluck-")):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                pytest.fail(f"the test left the thread {thread.name!r} running")
