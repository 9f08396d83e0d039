"""The script of a run: what is said about it, and its environment."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import random
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from potluck.apps.cli.run_company import Company
from potluck.apps.cli.run_gathering import Gathering, labels
from potluck.apps.cli.run_imports import imports
from potluck.apps.cli.run_places import (
    COMPANY,
    LAUNCHER,
    MEETING,
    PER_NODE,
    Crew,
    environments,
    group_of,
    port_in,
    workers_of,
)
from potluck.runtime.recorder_files import FOLDER_VARIABLE, trace_folder

if TYPE_CHECKING:
    from potluck.runtime.observing import Observer

__all__ = ["child_environments", "company_of", "facts_of", "saving_environment"]

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
