"""The script of a run: what is said about it, and its environment."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from potluck.apps.cli.launcher import Gathering, labels
from potluck.apps.cli.run_places import (
    COMPANY,
    LAUNCHER,
    MEETING,
    PER_NODE,
    Company,
    Crew,
    environments,
    group_of,
    port_in,
    workers_of,
)
from potluck.cluster.observer import Observer
from potluck.cluster.reports import Report
from potluck.net.dial import REFUSED
from potluck.trace.dump import FOLDER_VARIABLE, trace_folder

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

    from potluck.cluster.config import AutoDiscoveryConfig


# --------------------------------------------------------------------------------------------------
# What a script imports, found without running it: only what it uses has to be alike everywhere.

MOST_FILES = 200
"""Files of the user's own that are looked at."""


def imports(script: Path, package: str) -> bool:
    """Whether a script imports a package: itself, or in modules beside it, or by a package it uses.

    A script that cannot be read is taken to do so.
    """
    waiting, seen = [script], {script}
    while waiting:
        try:
            tree = ast.parse(waiting.pop().read_bytes())
        except (OSError, ValueError, SyntaxError, RecursionError):
            return True
        for name in _imported(tree):
            first, _, rest = name.partition(".")
            if package in {first, rest} or _needs(first, package):
                return True
            for path in _beside(script.parent, name):
                if path not in seen and len(seen) < MOST_FILES:
                    seen.add(path)
                    waiting.append(path)
    return False


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base
            yield from (f"{base}.{each.name}".lstrip(".") for each in node.names)


def _beside(folder: Path, name: str) -> list[Path]:
    """The files of a module that lies beside the script."""
    parts = name.split(".")
    found = []
    for end in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:end])
        found += [path / "__init__.py", path.with_suffix(".py")]
    return [each for each in found if each.is_file()]


def _needs(name: str, package: str) -> bool:
    """Whether an installed package of this name says that it needs the other one."""
    if name in sys.stdlib_module_names or name == "potluck":  # which works without
        return False
    try:
        needed = requires(name) or []
    except (PackageNotFoundError, ValueError):
        return False
    return any(
        each.split(";")[0].strip().startswith(package)
        and not each.split(";")[0].strip()[len(package) :][:1].isalnum()
        and "extra ==" not in each
        for each in needed
    )


# --------------------------------------------------------------------------------------------------

MEETING_PORTS = (20_000, 32_000)
"""Below those that Linux takes for outgoing connections."""

SHOWN = 16
"""Hexadecimal digits of a script's hash."""


def facts_of(script: Path, arguments: Sequence[str], per_node: int = 1) -> dict[str, str]:
    """What machines of one run compare, and with how many workers this one comes."""
    from potluck import __version__

    return {
        "script": script.name,
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest()[:SHOWN],
        "arguments": shlex.join(arguments),
        "python": platform.python_version(),
        "potluck": __version__,
        "numpy": version("numpy"),
        "torch": _version_of("torch") if imports(script, "torch") else "",
        PER_NODE: str(per_node),
        **dict(zip((MEETING, COMPANY), map(str, _free_ports(2)), strict=True)),
    }


def _free_ports(count: int) -> list[int]:
    """Ports that are free, and stay so until a script that may take long to begin takes them.

    Of those that neither we nor the system hand out by themselves.
    """
    from potluck.net import tcp

    found: list[int] = []
    for port in random.sample(range(*MEETING_PORTS), 64):
        with contextlib.suppress(OSError):
            tcp.listen("", port).close()
            found.append(port)
        if len(found) == count:
            return found
    return [*found, *range(MEETING_PORTS[0], MEETING_PORTS[0] + count)][:count]


def company_of(
    gathering: Gathering, *, json: bool = False
) -> tuple[Company, list[str], dict[str, str]]:
    """The machines of a run; where their launchers stay in touch, and what ours tells there."""
    me, *others = gathering.here
    crew = gathering.crew
    order = [] if crew is None else [group_of(each) for each in crew.launchers]
    names = labels(gathering.here)
    by_group = {group_of(each): each for each in others}
    company = Company(names[me.key], json=json, own_id=group_of(me), order=order)
    company.expect({group: names[each.key] for group, each in by_group.items()})
    places = {
        f"{_bracketed(host)}:{port}": None
        for each in by_group.values()
        for host in (gathering.hosts.get(each.key, ""), each.host)
        if host and (port := port_in(each, COMPANY))
    }
    facts = {LAUNCHER: group_of(me), "arguments": me.facts.get("arguments", "")}
    return company, list(places), facts


def _version_of(package: str) -> str:
    """Of a package that need not be there; without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def child_environments(
    observer: Observer, gathering: Gathering, peers: Sequence[str], facts: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each worker.

    With it ``potluck.join()`` finds the machines that are here now: the first worker listens where
    we did, so the others know where it is.  Ranks are set where all agree on them.
    """
    me, crew = gathering.here[0], gathering.crew
    launcher = {LAUNCHER: group_of(me)}
    common = _common(observer, gathering, peers, {**facts, **launcher})
    master = me.host
    if crew is not None and crew.launchers[0].key != me.key:
        first = crew.launchers[0]
        master = gathering.hosts.get(first.key) or first.host
    ports = _ports(observer.port.port, workers_of(me))
    return environments(common, me, crew, master, ports)


def _ports(first: int, count: int) -> list[int]:
    """Ports for so many workers: our own, and those after it that are free."""
    from potluck.net import tcp

    found = [first]
    for port in range(first + 1, first + 1 + 4 * count):
        if len(found) == count:
            break
        with contextlib.suppress(OSError, OverflowError):
            tcp.listen("", port).close()
            found.append(port)
    return [*found, *[0] * (count - len(found))]  # any other will do


def _wanted_workers(gathering: Gathering, crew: Crew | None) -> int:
    """How many processes the script waits for; with more machines than wanted, not for all."""
    if crew is not None and len(crew.launchers) <= gathering.wanted:
        return crew.world_size
    return gathering.wanted * min(map(workers_of, gathering.here))


def _common(
    observer: Observer, gathering: Gathering, peers: Sequence[str], facts: Mapping[str, str]
) -> dict[str, str]:
    others = [f"{_bracketed(each.host)}:{each.port}" for each in gathering.here[1:] if each.port]
    found = [*observer.addresses, *os.environ.get("POTLUCK_PEERS", "").replace(",", " ").split()]
    return {
        **os.environ,
        "POTLUCK_RUN": "1",
        "POTLUCK_JOB": observer.job or "",
        "POTLUCK_NAMESPACE": observer.namespace.name,
        "POTLUCK_MIN_NODES": str(_wanted_workers(gathering, gathering.crew)),
        "POTLUCK_PEERS": ",".join(dict.fromkeys([*peers, *found, *others])),
        "POTLUCK_FACTS": msgspec.json.encode(dict(facts)).decode(),
        FOLDER_VARIABLE: str(trace_folder() or ""),
    }


def saving_environment(
    *, resume: bool, fresh_start: bool = False, folder: Path | None
) -> dict[str, str]:
    """What tells the script's trainings where to save, and whether to go on from what is there."""
    found = {"POTLUCK_RESUME": "1"} if resume else {}
    if fresh_start:
        found["POTLUCK_FRESH_START"] = "1"
    return found if folder is None else {**found, "POTLUCK_CHECKPOINTS": str(folder.absolute())}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# --------------------------------------------------------------------------------------------------
# How waiting for a run looks: a live table in a terminal, lines elsewhere, JSON for programs.


class Screen(Protocol):
    """Where one sees who is here."""

    def show(self, gathering: Gathering) -> None:
        """Show what is known now; called often."""

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """Say something once."""


class _Lines:
    """For files, pipes and simple terminals: one line for each change."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, gathering: Gathering) -> None:
        """A line, if something has changed."""
        line = gathering.status_line()
        if line != self._last:
            self._last = line
            self.say(line)

    def say(self, sentence: str, *, grave: bool = False) -> None:  # noqa: ARG002 - words will do
        """Print a line."""
        import typer

        typer.echo(f"potluck: {sentence}", err=True)


class _Json:
    """For programs: one JSON object in a line for each change."""

    def __init__(self) -> None:
        self._last: object = None

    def show(self, gathering: Gathering) -> None:
        """An object, if something has changed."""
        names = labels(gathering.here)
        here = [
            {"name": names[each.key], "id": each.node, "state": each.state, "facts": each.facts}
            for each in gathering.here
        ]
        facts = {"wanted": gathering.wanted, "here": here, "missing": gathering.missing}
        if facts != self._last:
            self._last = facts
            self._print(facts)

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """An object with a sentence."""
        self._print({"error" if grave else "note": sentence})

    @staticmethod
    def _print(facts: object) -> None:
        import msgspec
        import typer

        typer.echo(msgspec.json.encode(facts).decode(), err=True)


@contextmanager
def open_screen(*, json: bool) -> Iterator[Screen]:
    """The screen that fits; all of it is on standard error, for the output is the script's."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if json:
        yield _Json()
    elif console.is_terminal and not console.is_dumb_terminal:
        from rich.live import Live

        with Live(console=console, auto_refresh=False, transient=False) as live:
            yield _Table(live)
    else:
        yield _Lines()


class _Table:
    """For a terminal: a table that changes in place."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._last = ""

    def show(self, gathering: Gathering) -> None:
        """Redraw, if something has changed."""
        state = f"{[(each.key, each.state) for each in gathering.here]} {gathering.missing}"
        if state != self._last:
            self._last = state
            self._live.update(_picture(gathering), refresh=True)

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """Print above the table."""
        from rich.text import Text

        self._live.console.print(Text(sentence, "bold red" if grave else ""))


def _picture(gathering: Gathering) -> Group:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for title in ("machine", "address", "state", "Python", "numpy"):
        table.add_column(title)
    odd = {
        name
        for difference in gathering.differences
        for names in list(difference.values.values())[1:]
        for name in names
    }
    names = labels(gathering.here)
    for number, report in enumerate(gathering.here):
        name = names[report.key] + (" (this one)" if number == 0 else "")
        state = "running" if report.role == "member" else report.state
        style = "yellow" if names[report.key] in odd else "green" if state != "waiting" else ""
        cells = (
            name,
            f"{report.host}:{report.port}",
            state,
            report.facts.get("python", ""),
            report.facts.get("numpy", ""),
        )
        table.add_row(*(Text(cell, style) for cell in cells))
    if not gathering.is_complete:
        for name in gathering.missing:
            table.add_row(*(Text(cell, "dim") for cell in (name, "", "missing", "", "")))
    number = gathering.count
    count = f"{number} of {gathering.wanted} {'is' if number == 1 else 'are'} here"
    notes = [Text(str(each), "yellow") for each in gathering.differences]
    return Group(table, Text(f"\n{count}", "bold"), *notes)


# --------------------------------------------------------------------------------------------------
# Why a run waits: what is known of the machines that are missing, and what to type.

FIRST_LOOK = 1.5
"""Seconds after which machines that are missing are looked for under other jobs."""

FIRST_WORDS = 4.0
"""Seconds after which reasons are told: by then whatever runs has been found."""


class Lookout:
    """Looks at all jobs of the namespace, from the moment at which that is of interest."""

    def __init__(self, config: AutoDiscoveryConfig, stack: contextlib.ExitStack) -> None:
        self._config = replace(config, job=None)
        self._stack = stack
        self._observer: Observer | None = None
        self._began = time.monotonic()

    def look(self, gathering: Gathering, command: str) -> list[str]:
        """Why the others are not here, in sentences; nothing in the first seconds."""
        seconds = time.monotonic() - self._began
        if self._observer is None and seconds >= FIRST_LOOK:
            self._observer = self._stack.enter_context(Observer(self._config))
        if self._observer is None or seconds < FIRST_WORDS:
            return []
        return list(
            reasons(
                gathering,
                self._observer.reports,
                self._observer.unpaired,
                self._observer.troubles,
                command,
            )
        )


def reasons(
    gathering: Gathering,
    reports: Iterable[Report],
    unpaired: Sequence[str],
    troubles: Mapping[str, str],
    command: str,
) -> Iterator[str]:
    """One sentence for each reason; ``command`` is what to type on the others."""
    if gathering.is_complete:
        return
    job = gathering.here[0].job
    here = {report.node for report in gathering.here}
    elsewhere = {
        report.node: report
        for report in reports
        if report.job not in {"", job}
        and report.role in {"launcher", "member"}
        and report.node not in here
    }
    for report in elsewhere.values():
        yield _other_job(report, job, command)
    known = {*here, *elsewhere}
    missing = [name for node, name in gathering.expected.items() if node not in known]
    yield from _silent(missing, troubles, job, command)
    for each in unpaired:
        yield (
            f"{each} runs Potluck, but is not paired with this machine: "
            "type `potluck pair` here, and there the command that it shows."
        )
    if len(gathering.expected) < gathering.wanted and not unpaired:
        yield _too_few(len(gathering.expected) - 1, gathering.wanted)


def _silent(
    missing: Sequence[str], troubles: Mapping[str, str], job: str, command: str
) -> Iterator[str]:
    """Of machines of the namespace that run nothing, as far as can be seen."""
    # A machine that refuses is on, and nothing listens there: the usual case before a run.
    unreachable = {
        name: why
        for name, why in troubles.items()
        if not all(REFUSED in each for each in why.split("; "))
    }
    for name in sorted(missing):
        if name in unreachable:
            yield f"{name} was seen but could not be reached: {unreachable[name]}"
    silent = sorted(name for name in missing if name not in unreachable)
    if silent:
        yield (
            f"{job} does not run on {_list(silent)} yet: type `{command}` there. "
            "If it does run there, `potluck doctor` looks for the reason."
        )


def _too_few(others: int, wanted: int) -> str:
    paired = "no other machine is" if others < 1 else f"{others} {'is' if others == 1 else 'are'}"
    return (
        f"This run waits for {wanted} machines, and {paired} paired with this one: "
        "type `potluck pair` here, and on the other the command that it shows."
    )


def _other_job(report: Report, job: str, command: str) -> str:
    name = report.name or report.node[:8]
    verb = "waits to run" if report.role == "launcher" else "runs"
    there = command_for(report.job, report.facts.get("script", ""))
    return f"{name} {verb} {report.job}, not {job}: type `{command}` there, or `{there}` here."


def command_for(job: str, script: str) -> str:
    """What starts a job.

    >>> command_for("train.py", "train.py"), command_for("night", "train.py")
    ('potluck run train.py', 'potluck run --job night train.py')
    """
    if not script or job == script:
        return f"potluck run {job}"
    return f"potluck run --job {job} {script}"


def _list(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
