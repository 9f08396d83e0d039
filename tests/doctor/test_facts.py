"""Signs of life: whether a machine whose port is silent is on."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from potluck import _platform
from potluck.doctor import facts
from potluck.doctor.facts import (
    PathFacts,
    TakenPort,
    gather_machine,
    holder_of,
    meaning_of,
    measure_passage,
    router,
    signs_of_life,
    within,
)
from potluck.net.addresses import Address, interfaces
from support.threads import PATIENCE


def test_signs_of_life_are_looked_for_on_other_doors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A refusal, an answer, a network card; or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        number = port.getsockname()[1]
        monkeypatch.setattr(facts, "PROBED_PORTS", (number,))
        assert signs_of_life("127.0.0.1") == f"it answers on port {number}"
    assert signs_of_life("127.0.0.1") == f"it refuses port {number} at once"
    monkeypatch.setattr(facts, "PROBED_PORTS", ())
    arp = tmp_path / "arp"
    arp.write_text(
        "IP address       HW type     Flags       HW address            Mask     Device\n"
        "10.0.0.2         0x1         0x2         02:fc:00:00:00:05     *        eth0\n"
        "10.0.0.3         0x1         0x0         00:00:00:00:00:00     *        eth0\n"
    )
    assert "02:fc:00:00:00:05" in signs_of_life("10.0.0.2", arp=arp)
    assert signs_of_life("10.0.0.3", arp=arp) == ""
    assert signs_of_life("10.0.0.4", arp=tmp_path / "missing") == ""


# --------------------------------------------------------------------------------------------------
# What a machine says of itself: true where it can be compared, empty where nobody tells.


def test_this_machine_is_described() -> None:
    """By what Python itself knows, and with networks that hold its own addresses."""
    found = interfaces()
    taken = TakenPort(52416, "nginx")
    machine = gather_machine(found, [taken], usual=4)
    assert machine.name == socket.gethostname()
    assert machine.program == sys.executable
    assert machine.system
    assert machine.taken == (taken,)
    for each in found:
        for host in each.hosts if not each.skipped else ():
            assert machine.is_attached(host)
    assert not machine.is_attached("203.0.113.9")


def test_names_lead_to_addresses_or_nowhere() -> None:
    """Each address once."""
    assert "127.0.0.1" in meaning_of("localhost")
    assert meaning_of("no-such-machine.invalid") == ()


def test_the_holder_of_a_port_is_named() -> None:
    """By name and number; nobody holds a port where none listens."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        number = port.getsockname()[1]
        assert f"(process {os.getpid()})" in holder_of(number)
    assert holder_of(number) == ""


def test_the_router_is_read_from_the_systems_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux has a file, macOS a program."""
    table = tmp_path / "route"
    table.write_text("Iface Destination Gateway Flags\neth0 0000000A 00000000 0001 0 0 0 0 0 0 0\n")
    assert router(table) == ""
    monkeypatch.setattr(_platform, "IS_MACOS", True)
    monkeypatch.setattr(facts, "_output_of", lambda *_: "  gateway: 10.0.0.254\n  x: y\n")
    assert router() == "10.0.0.254"
    monkeypatch.setattr(_platform, "IS_MACOS", False)
    monkeypatch.setattr(_platform, "IS_WINDOWS", True)
    assert router() == ""


def test_windows_is_asked_what_it_takes_the_network_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program of its own, which nobody else has."""
    assert gather_machine([]).network_category == ""
    asked: list[str] = []

    def answer(*command: str) -> str:
        asked.extend(command)
        return "Public\r\n"

    monkeypatch.setattr(_platform, "IS_WINDOWS", True)
    monkeypatch.setattr(facts, "_output_of", answer)
    assert gather_machine([]).network_category == "Public"
    assert "(Get-NetConnectionProfile).NetworkCategory" in asked


# --------------------------------------------------------------------------------------------------
# Packets of full size: that they arrive is seen without the other program's help.


def test_what_arrives_has_passed() -> None:
    """The other side's kernel says so, even if its program never looks."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        passage = measure_passage(Address(*port.getsockname()))
    assert passage is not None
    assert passage.passes == passage.packet > 1500


def test_the_largest_size_that_passes_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that loses the larger ones; one that loses all tells nothing of their size."""
    limit = 1300

    def lose(_address: Address, size: int) -> tuple[int, bool | None]:
        return size or 1500, 0 < size <= limit

    monkeypatch.setattr(facts, "_try", lose)
    assert measure_passage(Address("10.0.0.2", 1)) == PathFacts(1500, 1280)
    limit = 100
    assert measure_passage(Address("10.0.0.2", 1)) is None


def test_where_nobody_listens_nothing_is_told() -> None:
    """And no error leaves the door."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        address = Address(*port.getsockname())
    assert measure_passage(address) is None


# --------------------------------------------------------------------------------------------------
# Waiting for what has no deadline of its own.


def test_one_who_takes_too_long_is_left() -> None:
    """What is assumed instead is returned at the deadline."""
    gate = threading.Event()
    began = time.monotonic()
    assert within(0.05, lambda: gate.wait(PATIENCE), False) is False
    assert time.monotonic() - began < PATIENCE
    gate.set()
