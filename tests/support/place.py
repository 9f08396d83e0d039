"""What a program sees that runs as one rank in a process of its own; see ``support.ranks``.

The process takes commands as JSON lines from its standard input and answers with JSON lines; what
programs print goes to the log instead.  It ends with its standard input, so that no rank outlives
the tests that started it, whatever became of them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import msgspec

from potluck import TcpBackend, logs
from support.threads import PATIENCE


class Failure(TypedDict):
    """An exception as another process can look at it."""

    kind: str
    kinds: list[str]
    """The names of all classes it is an instance of."""
    text: str
    rank: int | None
    missing: list[int]
    expected: Any
    got: Any
    at: float
    """When it was caught, on the clock that all processes of a machine share."""
    trace: str


def as_failure(error: BaseException) -> Failure:
    """Describe an exception."""
    return Failure(
        kind=type(error).__name__,
        kinds=[base.__name__ for base in type(error).__mro__],
        text=str(error),
        rank=getattr(error, "rank", None),
        missing=list(getattr(error, "missing", ())),
        expected=_plain(getattr(error, "expected", None)),
        got=_plain(getattr(error, "got", None)),
        at=time.monotonic(),
        trace="".join(traceback.format_exception(error)),
    )


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | str) else repr(value)


Words: TypeAlias = "queue.SimpleQueue[str]"


class Place:
    """One rank's place in a group."""

    def __init__(self, wire: Wire, command: dict[str, Any], words: Words) -> None:
        self._wire = wire
        self._words = words
        self.rank: int = command["rank"]
        self.world_size: int = command["world_size"]
        self.master: str = command["master"]

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def join(self, *, timeout: float = PATIENCE, namespace: str | None = None) -> TcpBackend:
        """Become part of the group."""
        return TcpBackend(
            self.rank, self.world_size, self.master, timeout=timeout, namespace=namespace
        )

    def wait_for_start(self) -> None:
        """Wait until every rank's interpreter is up; see ``support.ranks.start_together``."""
        self.say("ready")
        self.hear("go")

    def say(self, word: str, **facts: Any) -> None:
        """Tell the test something while the program runs."""
        self._wire.write({"word": word, "at": time.monotonic(), **facts})

    def hear(self, word: str, timeout: float = PATIENCE) -> None:
        """Wait until the test says ``word``."""
        said = self._words.get(timeout=timeout)
        assert said == word, f"expected to hear {word!r}, heard {said!r}"

    def next_word(self) -> str | None:
        """What the test has said, if anything, without waiting."""
        return None if self._words.empty() else self._words.get()

    def failure_of(self, call: Callable[..., Any], *args: Any, **options: Any) -> Failure:
        """Call something that must fail, and describe how it did."""
        try:
            call(*args, **options)
        except Exception as error:  # noqa: BLE001 - which one it is, is for the test to judge
            return as_failure(error)
        msg = f"{getattr(call, '__qualname__', call)} raised nothing"
        raise AssertionError(msg)


def resident() -> int:
    """Bytes of memory this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Wire:
    """The lines between a rank's process and the test."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[tuple[dict[str, Any], Words]] = queue.SimpleQueue()
        self._out = os.dup(1)  # not inheritable: no program that a rank starts can write here
        os.dup2(2, 1)
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="wire", daemon=True).start()

    def write(self, message: dict[str, Any]) -> None:
        """Send one line to the test."""
        line = msgspec.json.encode(message) + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._out, line) :]

    def _listen(self) -> None:
        rest = b""
        words: Words = queue.SimpleQueue()
        while data := os.read(0, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                command = msgspec.json.decode(line)
                if "word" in command:
                    words.put(command["word"])
                else:
                    words = queue.SimpleQueue()  # what was said to an earlier program is over
                    self.commands.put((command, words))
        os._exit(0)


def main() -> None:
    """Run one program after the other."""
    logging.basicConfig(format="%(message)s")  # a rank's warnings are in its log
    wire, environment = Wire(), dict(os.environ)
    modules: dict[str, Any] = {}
    while True:
        command, words = wire.commands.get()
        logs.begin_anew()  # what the last program said too often may be said again
        try:
            program = getattr(_load(command["file"], modules), command["program"])
            value = program(Place(wire, command, words), *command["arguments"])
        except Exception as error:  # noqa: BLE001 - reported in full
            wire.write({"failure": as_failure(error)})
        else:
            wire.write({"value": value})
        os.environ.clear()  # the next program may be of another test
        os.environ.update(environment)


def _load(file: str, modules: dict[str, Any]) -> Any:
    if file not in modules:
        spec = importlib.util.spec_from_file_location(f"program_{Path(file).stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        modules[file] = module
    return modules[file]
