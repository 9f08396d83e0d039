"""The command, the doctor and the dashboard tell one story, seen from machines of a network."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command import COMMAND
from support.hosts import Host, Hosts
from support.paired_hosts import variables
from support.patients import Doctor, admit
from support.threads import PATIENCE, eventually, together

pytestmark = [pytest.mark.netns, pytest.mark.slow]

WORK = """
import sys
import potluck

with potluck.join(3, job="story", timeout=60):
    print("in", flush=True)
    sys.stdin.read()
"""

# One request over the network of a host, which the test itself is not in.
ASK = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())
"""


@contextlib.contextmanager
def running(folder: Path, host: Host, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A program on a host, until the test is over."""
    with subprocess.Popen(
        host.command(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=variables(folder, host, "lab"),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    """What a program says first."""
    assert process.stdout is not None
    return process.stdout.readline()


class Onlooker:
    """All three ways to look from one host; its dashboard runs all the time."""

    def __init__(self, folder: Path, host: Host, url: str) -> None:
        self._folder = folder
        self._host = host
        self._url = url

    def look(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """What the command, the doctor and the dashboard say, at about the same time."""
        doctor = Doctor(self._folder, self._host, seconds=1.0)
        status = Doctor(self._folder, self._host, verb=["status", "--json"])
        told = status.report(), doctor.report()
        page = self._host.run([sys.executable, "-c", ASK, f"{self._url}api/picture"]).stdout
        return *told, json.loads(page)


@pytest.mark.soak  # it looks again and again, which takes long where others work too
@pytest.mark.timeout(180)
def test_a_cut_link_and_another_namespace_are_told_alike_by_all_three(tmp_path: Path) -> None:
    """Of three that work together one loses its cable; a fourth has a secret of its own."""
    with Hosts("alpha beta gamma delta") as hosts, contextlib.ExitStack() as stack:
        alpha, beta, gamma, delta = hosts.values()
        for host, letter in zip(hosts.values(), "llld", strict=True):
            admit(tmp_path, host, letter)
        members = [
            stack.enter_context(running(tmp_path, host, sys.executable, "-c", WORK))
            for host in (alpha, beta, gamma)
        ]
        pages = [
            stack.enter_context(running(tmp_path, host, str(COMMAND), "dashboard", "--json"))
            for host in (alpha, delta)
        ]
        assert [first_line(each) for each in members] == ["in\n"] * 3
        inside, outside = (
            Onlooker(tmp_path, host, json.loads(first_line(page))["url"])
            for host, page in zip((alpha, delta), pages, strict=True)
        )
        beta.unplug()
        together(
            lambda: eventually(lambda: told_of_strangers(outside), 3 * PATIENCE),
            lambda: eventually(lambda: told_of_silence(inside), 3 * PATIENCE),
            within=4 * PATIENCE,
        )


def told_of_strangers(onlooker: Onlooker) -> bool:
    """Whether all three say that the machine which is seen belongs to another group."""
    status, doctor, picture = onlooker.look()
    causes = [f"{each['cause']}." for each in doctor["findings"] if each["check"] == "namespaces"]
    assert (status["exit"], status["jobs"]) == (3, [])
    seen = [each for each in causes if "10.66.0.1" in each]
    return len(seen) == 1 and seen[0] in status["story"][0] and seen[0] in picture["story"][0]


def told_of_silence(onlooker: Onlooker) -> bool:
    """Whether all three say, word for word, how the one who is left goes on, and without whom."""
    status, doctor, picture = onlooker.look()
    story: list[list[str]] = status["story"]
    said = " ".join(story[0])
    return "without beta" in said and story == doctor["story"] == picture["story"]
