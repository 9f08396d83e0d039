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
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from potluck.apps.cli.launcher import LauncherWait, labels
from potluck.apps.cli.output import list_names
from potluck.apps.cli.run_places import (
    COMPANY,
    LAUNCHER,
    MEETING,
    PER_NODE,
    Participants,
    RankAssignment,
    environments,
    group_of,
    port_in,
    workers_of,
)
from potluck.cluster.observer import Observer
from potluck.cluster.reports import StatusReport
from potluck.net.addresses import NO_NETWORK
from potluck.net.dial import REFUSED
from potluck.trace.dump import FOLDER_VARIABLE, trace_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

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
    gathering: LauncherWait, *, json: bool = False
) -> tuple[Participants, list[str], dict[str, str]]:
    """The machines of a run; where their launchers stay in touch, and what ours tells there."""
    me, *others = gathering.here
    crew = gathering.crew
    order = [] if crew is None else [group_of(each) for each in crew.launchers]
    names = labels(gathering.here)
    by_group = {group_of(each): each for each in others}
    company = Participants(names[me.key], json=json, own_id=group_of(me), order=order)
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
    observer: Observer, gathering: LauncherWait, peers: Sequence[str], facts: Mapping[str, str]
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
    """Ports for this many workers: our own, and free ones after it."""
    from potluck.net import tcp

    found = [first]
    for port in range(first + 1, first + 1 + 4 * count):
        if len(found) == count:
            break
        with contextlib.suppress(OSError, OverflowError):
            tcp.listen("", port).close()
            found.append(port)
    return [*found, *[0] * (count - len(found))]  # any other will do


def _wanted_workers(gathering: LauncherWait, crew: RankAssignment | None) -> int:
    """How many processes the script waits for; with more machines than wanted, not for all."""
    if crew is not None and len(crew.launchers) <= gathering.wanted:
        return crew.world_size
    return gathering.wanted * min(map(workers_of, gathering.here))


def _common(
    observer: Observer, gathering: LauncherWait, peers: Sequence[str], facts: Mapping[str, str]
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
    """What tells the script's trainings where to save, and whether to resume from what is there."""
    found = {"POTLUCK_RESUME": "1"} if resume else {}
    if fresh_start:
        found["POTLUCK_FRESH_START"] = "1"
    return found if folder is None else {**found, "POTLUCK_CHECKPOINTS": str(folder.absolute())}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# --------------------------------------------------------------------------------------------------
# How waiting for a run looks: a live table in a terminal, lines elsewhere, JSON for programs.


class WaitPicture:
    """Which machines are here, and which are missing."""

    def __init__(self, gathering: LauncherWait) -> None:
        self._gathering = gathering

    def draw(self) -> RenderableType:
        """As a table."""
        return _draw(self._gathering)

    def line(self) -> str:
        """In a line."""
        return self._gathering.status_line()

    def facts(self) -> dict[str, Any]:
        """For programs."""
        gathering = self._gathering
        names = labels(gathering.here)
        here = [
            {"name": names[each.key], "id": each.node, "state": each.state, "facts": each.facts}
            for each in gathering.here
        ]
        return {"wanted": gathering.wanted, "here": here, "missing": gathering.missing}


def _draw(gathering: LauncherWait) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from potluck.apps.cli.output import table

    machines = table(("machine", "address", "state", "Python", "numpy"))
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
        machines.add_row(*(Text(cell, style) for cell in cells))
    if not gathering.is_complete:
        for name in gathering.missing:
            machines.add_row(*(Text(cell, "dim") for cell in (name, "", "missing", "", "")))
    number = gathering.count
    count = f"{number} of {gathering.wanted} {'is' if number == 1 else 'are'} here"
    notes = [Text(str(each), "yellow") for each in gathering.differences]
    return Group(machines, Text(f"\n{count}", "bold"), *notes)


# --------------------------------------------------------------------------------------------------
# Why a run waits: what is known of the machines that are missing, and what to type.


def first_words(expected: Mapping[str, str], nodes: int | None) -> Iterator[str]:
    """What a person should know at once: on a machine that is not paired, what to do about it."""
    if not expected:  # every machine with the secret belongs, and there is no list of them
        if nodes is None:
            yield "No list of machines is kept here, so this one begins now; --nodes N waits for N."
    elif len(expected) == 1 and nodes is None:
        yield f"{UNPAIRED}, so the script runs on it alone; `potluck pair` adds a machine."
    elif len(expected) == 1 and nodes != 1:
        yield f"{UNPAIRED}. {HOW_TO_PAIR}"


FIRST_LOOK = 1.5
"""Seconds after which machines that are missing are looked for under other jobs."""

UNPAIRED = "This machine is not paired with any other"
HOW_TO_PAIR = (
    "To pair them, run `potluck pair` here, and the command that it shows on the other machine."
)
AGAIN = "and start it again."

FIRST_WORDS = 4.0
"""Seconds after which reasons are told: by then whatever runs has been found."""


class JobWatcher:
    """Looks at all jobs of the group, from the moment at which that is of interest."""

    def __init__(
        self, launcher: Observer, config: AutoDiscoveryConfig, stack: contextlib.ExitStack
    ) -> None:
        self._launcher = launcher
        self._config = replace(config, job=None)
        self._stack = stack
        self._observer: Observer | None = None
        self._began = time.monotonic()

    def look(self, gathering: LauncherWait, command: str) -> list[str]:
        """Why the others are not here, in sentences; most are not known in the first seconds."""
        if not self._launcher.has_network:
            return [NO_NETWORK]  # what is seen of the others says nothing of them
        differing = self._launcher.differing  # known at once, and nothing else explains them
        seconds = time.monotonic() - self._began
        if self._observer is None and seconds >= FIRST_LOOK:
            self._observer = self._stack.enter_context(Observer(self._config))
        if self._observer is None or seconds < FIRST_WORDS:
            return list(differing.values())
        others = reasons(
            gathering,
            self._observer.reports,
            self._observer.strangers,
            self._observer.troubles,
            command,
            differing,
        )
        return [*differing.values(), *others]


def reasons(
    gathering: LauncherWait,
    reports: Iterable[StatusReport],
    strangers: Mapping[str, str],
    troubles: Mapping[str, str],
    command: str,
    differing: Iterable[str] = (),
) -> Iterator[str]:
    """One sentence for each reason; ``command`` is what to type on the others.

    ``strangers`` are machines that were heard and do not know our secret, by id; of those that
    are ``differing``, in their version, it is known why they are not here.
    """
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
    for node, name in gathering.expected.items():
        if node in strangers and node not in here:
            yield f"{name} runs something since before it was paired: stop that there, {AGAIN}"
    known = {*here, *elsewhere, *strangers, *differing}
    missing = [name for node, name in gathering.expected.items() if node not in known]
    yield from _silent(missing, troubles, job, command)
    unpaired = [who for node, who in strangers.items() if node not in gathering.expected]
    for each in unpaired:
        yield f"{each} runs Potluck, but is not paired with this machine. {HOW_TO_PAIR}"
    others = len(gathering.expected) - 1
    if 0 < others < gathering.wanted - 1 and not unpaired:
        yield _too_few(others, gathering.wanted)


def _silent(
    missing: Sequence[str], troubles: Mapping[str, str], job: str, command: str
) -> Iterator[str]:
    """About machines of the group that run nothing, as far as can be seen."""
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
            f"{job} does not run on {list_names(silent)} yet: type `{command}` there. "
            "If it does run there, `potluck doctor` looks for the reason."
        )


def _too_few(others: int, wanted: int) -> str:
    paired = f"{others} {'is' if others == 1 else 'are'}"
    return f"This run waits for {wanted} machines, and {paired} paired with this one. {HOW_TO_PAIR}"


def _other_job(report: StatusReport, job: str, command: str) -> str:
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
