"""Processes of their own that look for each other, here or on emulated machines.

Each says on its output, a line of JSON at a time, whom it has found, and does what it is told on
its input: ``remember`` whom it sees, ``leave``.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.hosts import Host
from support.threads import PATIENCE

PROGRAM = """
import json, sys, threading, time
from pathlib import Path
from potluck.discovery.records import Advert, DiscoveryConfig
from potluck.discovery.service import Discovery
from potluck.identity.node import NodeIdentity
from potluck.identity.node import this_process
from potluck.identity.namespace import NetworkNamespace
from potluck._types import ProcessId

options = json.loads(sys.argv[1])
home = Path(options["home"])
node = NodeIdentity.load_or_generate().id
me = ProcessId(node, this_process(node, home).incarnation)
lab = NetworkNamespace("lab", options["letter"].encode() * 32, home=home)
news = threading.Event()
words = []

def listen():
    for line in sys.stdin:
        words.append(line.strip())
        news.set()
    words.append("leave")
    news.set()

def tell(**facts):
    print(json.dumps({"after": time.monotonic() - begin, **facts}), flush=True)

threading.Thread(target=listen, daemon=True).start()
advert = Advert.of(lab, me, job=options["job"], port=options["port"])
config = DiscoveryConfig.from_environment(options["peers"])
begin = time.monotonic()
with Discovery(advert, config, news.set) as discovery:
    tell(event="started", me=str(me))
    while True:
        news.wait()
        news.clear()
        for event in discovery.drain():
            seen = event.sighting
            tell(
                event=type(event).__name__.removeprefix("Peer").lower(),
                who=str(seen.process) if seen.process else seen.node,
                sources=seen.sources,
                addresses=[str(address) for address in seen.addresses],
                reason=getattr(event, "reason", ""),
            )
        while words:
            word = words.pop(0)
            if word == "leave":
                sys.exit()
            discovery.remember(discovery.sightings())
"""


class Seeker:
    """One process; a context manager that kills it if it has not left by itself."""

    def __init__(
        self,
        home: Path,
        *,
        host: Host | None = None,
        letter: str = "l",
        job: str = "train.py",
        port: int = 4711,
        peers: Sequence[str] = (),
    ) -> None:
        options = {"home": str(home), "letter": letter, "job": job, "port": port, "peers": peers}
        command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
        self._process = subprocess.Popen(
            host.command(command) if host else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "POTLUCK_HOME": str(home)},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Seeker:  # noqa: PYI034 - it is no base class
        """Itself, started."""
        self.me = str(self.wait_for("started")["me"])
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it."""
        self.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(json.dumps({"event": "ended", "after": 0.0}))

    def wait_for(self, event: str, who: str = "", *, source: str = "") -> dict[str, Any]:
        """The first event of this kind, about somebody and from a source, past ones included."""
        deadline = time.monotonic() + PATIENCE
        looked_at = 0
        while True:
            for each in self.events[looked_at:]:
                if each["event"] == "ended" != event:
                    msg = f"it ended before {event} {who}, with {self.events}"
                    raise AssertionError(msg)
                fits = each["event"] == event and who in {"", each.get("who")}
                if fits and (not source or source in each["sources"]):
                    return each
            looked_at = len(self.events)
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                msg = f"no {event} {who}, only {self.events}"
                raise AssertionError(msg) from None
            self.events.append(json.loads(line))

    def found(self) -> set[str]:
        """Everybody it has found so far, as far as it has said."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.events.append(json.loads(self._lines.get_nowait()))
        return {each["who"] for each in self.events if each["event"] == "found"}

    def tell(self, word: str) -> None:
        """Give it an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def leave(self) -> None:
        """Let it say goodbye and end."""
        self.tell("leave")
        assert self._process.wait(PATIENCE) == 0

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._reader.join(PATIENCE)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@contextlib.contextmanager
def seekers(*crowd: Seeker) -> Iterator[list[Seeker]]:
    """Several at once, all started."""
    with contextlib.ExitStack() as stack:
        for each in crowd:
            stack.callback(each.kill)
        yield [stack.enter_context(each) for each in crowd]
