"""Follows the steps of a page as several people would: each on their own machine, at once.

A line ``first$ potluck pair`` is a command on the machine *first*.  The commands of one machine run
one after the other.  The first code that a machine shows is typed in place of the page's first
code, the second in place of its second, and so on.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.hosts import Host
from support.threads import PATIENCE, eventually, together

CODE = re.compile(r"\b\d{1,2}-[a-z]+-[a-z]+\b")
_LINE = re.compile(r"^(\w+)\$ +(.*?)(?: +#.*)?$", re.MULTILINE)


@dataclass
class Step:
    """A command that was run."""

    command: str
    output: str
    seconds: float
    exit_code: int


def steps_of(block: str) -> dict[str, list[str]]:
    """The commands of each machine in a block of a page.

    >>> steps_of("one$ potluck pair   # shows a code")
    {'one': ['potluck pair']}
    """
    found: dict[str, list[str]] = {}
    for machine, command in _LINE.findall(block):
        found.setdefault(machine, []).append(command)
    return found


@dataclass
class Walkthrough:
    """The machines of a page, and the folder in which each has its files."""

    folder: Path
    page: str
    hosts: Mapping[str, Host]
    commands: Mapping[str, Sequence[str]]
    """What ``potluck`` is on each machine."""
    _codes: list[str] = field(default_factory=list)
    _written: list[str] = field(default_factory=list)

    def place(self, machine: str) -> Path:
        """Where a machine's user is."""
        where = self.folder / machine
        where.mkdir(exist_ok=True)
        return where

    def follow(self, steps: Mapping[str, Sequence[str]]) -> dict[str, list[Step]]:
        """Run the steps of all machines at once."""
        commands = [command for each in steps.values() for command in each]
        self._written += sorted(
            {code for each in commands for code in CODE.findall(each)}, key=self.page.index
        )
        lists = together(
            *(lambda m=machine: [self._run(m, each) for each in steps[m]] for machine in steps),
            within=3 * PATIENCE,
        )
        return dict(zip(steps, lists, strict=True))

    def _run(self, machine: str, command: str) -> Step:
        if CODE.search(command):
            number = self._written.index(CODE.findall(command)[0])
            eventually(lambda: len(self._codes) > number)
            command = CODE.sub(self._codes[number], command)
        words = shlex.split(command)
        assert words[0] == "potluck"
        kept = {name: value for name, value in os.environ.items() if "POTLUCK" not in name}
        began = time.monotonic()
        with subprocess.Popen(
            self.hosts[machine].command([*self.commands[machine], *words[1:]]),
            cwd=self.place(machine),
            env=kept | {"POTLUCK_HOME": str(self.place(machine) / ".potluck")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            watchdog = threading.Timer(1.5 * PATIENCE, process.kill)
            watchdog.start()
            try:
                output = self._read(process)
            finally:
                watchdog.cancel()
        return Step(command, output, time.monotonic() - began, process.returncode)

    def _read(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if (found := CODE.search(line)) and found[0] not in self._codes:
                self._codes.append(found[0])
        return "".join(lines)
