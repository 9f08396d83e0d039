"""``potluck run`` on several machines: who meets whom, why it waits, and how it ends."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command import COMMAND, START, end_all
from support.hosts import Host, Hosts
from support.paired_hosts import pair, variables
from support.threads import PATIENCE, eventually

pytestmark = [pytest.mark.netns, pytest.mark.timeout(4 * PATIENCE)]

TOGETHER = """
import os, potluck
with potluck.join() as cluster:
    cluster.barrier()
    print("rank", cluster.rank, "of", cluster.world_size, "was", os.environ["RANK"])
"""

# Attic ends in the middle of the work, in the way that it is told.
MISFORTUNE = """
import os, pathlib, signal, sys, time
import numpy as np
import potluck

def step(number):
    if os.uname().nodename == "attic" and number == 5:
        if sys.argv[1] == "raise":
            raise ValueError("bad batch")
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "leave":
            sys.exit()

with potluck.join() as cluster:
    for number in range(10_000):
        cluster.all_reduce(np.ones(10))
        print("step", number, flush=True)
        step(number)
"""


_ALL_HERE = re.compile(r"^potluck: (\d) of \1 (?:is|are) here")


class Terminal:
    """The command on a host, and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))

    def wait_for(self, words: str) -> None:
        """Wait until a line with these words has come."""
        eventually(lambda: self.process.poll() is not None or bool(self.said(words)), PATIENCE)
        assert self.said(words), self.lines

    def said(self, words: str) -> list[str]:
        """The lines with these words."""
        return [line for line in self.lines if words in line]

    def end(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    @property
    def words(self) -> list[str]:
        """What the command itself has said since all machines were there."""
        begun = [number for number, line in enumerate(self.lines) if _ALL_HERE.search(line)]
        said = [line for line in self.lines[begun[-1] + 1 :] if line.startswith("potluck: ")]
        return [line.removeprefix("potluck: ") for line in said if "`potluck trace`" not in line]


class Office:
    """Machines with a person at each."""

    def __init__(self, hosts: Hosts, folder: Path, stack: contextlib.ExitStack) -> None:
        self.hosts = hosts
        self.folder = folder
        self._stack = stack

    def write(self, name: str, text: str, where: str = "") -> None:
        """A script that lies on all machines, or in a folder of one."""
        file = self.folder / where / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)

    def run(self, machine: str, *arguments: str, where: str = "") -> Terminal:
        """Type ``potluck run`` on a machine."""
        host = self.hosts[machine]
        process = subprocess.Popen(  # its output is read by a Terminal, to its end
            host.command([sys.executable, "-c", START, str(COMMAND), "run", *arguments]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables(self.folder, host),
            cwd=self.folder / where,
            text=True,
        )
        terminal = Terminal(process)
        self._stack.callback(terminal.end)
        self._stack.callback(end_all, process.pid)
        return terminal

    def pair(self, first: str, second: str) -> None:
        """Make two machines belong together."""
        hosts: tuple[Host, Host] = self.hosts[first], self.hosts[second]
        pair(self.folder, *hosts)


@contextlib.contextmanager
def office(folder: Path, machines: str) -> Iterator[Office]:
    """Machines that are not paired yet."""
    with contextlib.ExitStack() as stack:
        yield Office(stack.enter_context(Hosts(machines)), folder, stack)


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    """Desk and attic, paired."""
    with office(tmp_path_factory.mktemp("office"), "desk attic") as found:
        found.pair("desk", "attic")
        yield found


@pytest.fixture
def two(paired: Office) -> Iterator[Office]:
    """The same for one test: what runs there ends with it."""
    with contextlib.ExitStack() as stack:
        found = Office(paired.hosts, paired.folder, stack)
        found.write("together.py", TOGETHER)
        found.write("misfortune.py", MISFORTUNE)
        yield found


def test_rank_0_is_where_the_command_was_typed_first_and_all_say_who_finished_how(
    two: Office,
) -> None:
    """For join() and for the variables of torchrun, whichever machine is first."""
    for first, second in (("desk", "attic"), ("attic", "desk")):
        one = two.run(first, "together.py")
        one.wait_for("1 of 2 is here")
        other = two.run(second, "together.py")
        assert [one.end(), other.end()] == [0, 0], (one.lines, other.lines)
        assert one.said("rank 0 of 2 was 0")
        assert other.said("rank 1 of 2 was 1")
        assert one.words == other.words == [f"Finished: {first} ok, {second} ok."]


def test_different_scripts_do_not_stop_each_other(two: Office) -> None:
    """Each waits, and says what the other machine does instead; once they agree they begin."""
    two.write("other.py", "print('other')")
    meet = [two.run(name, "together.py") for name in ("desk", "attic")]
    assert [each.end() for each in meet] == [0, 0]  # now they know where the other is
    desk, attic = (
        two.run("desk", "--nodes", "2", "together.py"),
        two.run("attic", "--nodes", "2", "--timeout", "12", "other.py"),
    )
    desk.wait_for("waits to run")
    attic.wait_for("waits to run")
    assert attic.end() == 3
    assert desk.said("waits to run")[0] == (
        "potluck: attic waits to run other.py, not together.py: "
        "type `potluck run together.py` there, or `potluck run other.py` here."
    )
    assert two.run("attic", "together.py").end() == 0
    assert desk.end() == 0
    assert not desk.said("differs")


def test_of_two_versions_of_a_script_is_said_whose_differs(two: Office) -> None:
    """By the names of the machines, on both of them."""
    two.write("together.py", "print('another')", "old")
    runs = [two.run("desk", "together.py"), two.run("attic", "together.py", where="old")]
    for each in runs:
        assert each.end() == 1
        assert each.words == [
            "The script on attic differs from the one on desk.",
            "Copy the same script to all machines, or use --anyway.",
        ]


def test_machines_that_are_not_paired_are_told_what_to_type(tmp_path: Path) -> None:
    """And one where the other machine of the pair runs nothing."""
    with office(tmp_path, "desk attic") as rooms:
        rooms.write("train.py", TOGETHER)
        runs = [rooms.run(each, "--nodes", "2", "train.py") for each in ("desk", "attic")]
        for each in runs:
            each.wait_for("is not paired with this machine: type `potluck pair` here")
            each.process.send_signal(signal.SIGINT)
            assert each.end() == 130
        rooms.pair("desk", "attic")
        desk = rooms.run("desk", "train.py")
        desk.wait_for("train.py does not run on attic yet: type `potluck run train.py` there.")
        assert rooms.run("attic", "train.py").end() == 0
        assert desk.end() == 0


def misfortune(rooms: Office, what: str) -> tuple[Terminal, Terminal]:
    """The two machines at work, typed first on desk."""
    desk = rooms.run("desk", "misfortune.py", what)
    desk.wait_for("1 of 2 is here")
    attic = rooms.run("attic", "misfortune.py", what)
    for each in (desk, attic):
        each.wait_for("step 4")
    return desk, attic


def test_an_error_reaches_the_other_machine_as_one_line(two: Office) -> None:
    """The traceback is where it happened; the other machine's own would tell nothing."""
    desk, attic = misfortune(two, "raise")
    assert [desk.end(), attic.end()] == [1, 1]
    cause = "attic: ValueError: bad batch, misfortune.py:9"
    for each in (desk, attic):
        first, last = each.words
        assert first == cause
        assert re.fullmatch(r"Finished: desk stopped after \S+ s, attic failed after \S+ s\.", last)
    assert not desk.said("Traceback")
    assert len(attic.said("Traceback")) == 1


def test_a_script_that_is_killed_is_named_with_the_signal_and_its_memory(two: Office) -> None:
    """On both machines; the exit code is what a shell would say."""
    desk, attic = misfortune(two, "kill")
    assert [desk.end(), attic.end()] == [1, 137]
    for each in (desk, attic):
        first, last = each.words
        assert re.fullmatch(
            r"attic: killed by SIGKILL; it used up to \S+ MB, and \S+ .B of \S+ GB were free.*",
            first,
        )
        assert "attic killed by SIGKILL after " in last
        assert not each.said("Traceback")


def test_ctrl_c_on_one_machine_reaches_the_other_as_one_line(two: Office) -> None:
    """Without a traceback on either."""
    desk, attic = misfortune(two, "work")
    desk.process.send_signal(signal.SIGINT)
    assert [desk.end(), attic.end()] == [130, 1]
    for each in (desk, attic):
        first, last = each.words
        assert first.startswith("desk: interrupted by Ctrl-C, misfortune.py:")
        assert re.fullmatch(
            r"Finished: desk interrupted after \S+ s, attic stopped after \S+ s\.", last
        )
        assert not each.said("Traceback")


def test_a_machine_that_ends_before_the_others_is_named(two: Office) -> None:
    """With the arguments, where those are not the same."""
    desk = two.run("desk", "misfortune.py", "work")
    desk.wait_for("1 of 2 is here")
    attic = two.run("attic", "misfortune.py", "leave")
    assert [desk.end(), attic.end()] == [1, 0]
    assert not desk.said("Traceback")
    assert desk.words[-2] == (
        "attic: its script ended without an error while others needed it; "
        "its arguments differ (attic: leave; desk: work)."
    )
    for each in (desk, attic):
        assert re.fullmatch(r"Finished: desk stopped after \S+ s, attic ok\.", each.words[-1])


def test_the_timeout_ends_the_command_while_its_script_waits(tmp_path: Path) -> None:
    """The machines that were wanted are here, but the script waits for more."""
    with office(tmp_path, "desk") as rooms:
        rooms.write("train.py", "import potluck\npotluck.join(min_nodes=2)")
        desk = rooms.run("desk", "--nodes", "1", "--timeout", "5", "train.py")
        assert desk.end() == 3
        assert desk.words == ["desk: --timeout ended it after 5.0 s; its script was still running"]
