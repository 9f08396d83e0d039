"""What a machine says of itself: true where it can be compared, empty where nobody tells."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from potluck.net.addresses import interfaces
from potluck.runtime.diagnosis import machine_facts
from potluck.runtime.diagnosis.machine import TakenPort
from potluck.runtime.diagnosis.machine_facts import gather_machine, holder_of, meaning_of, router


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
    with socket.create_server(("127.0.0.1", 0)) as door:
        number = door.getsockname()[1]
        assert f"(process {os.getpid()})" in holder_of(number)
    assert holder_of(number) == ""


def test_the_router_is_read_from_the_systems_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux has a file, macOS a program."""
    table = tmp_path / "route"
    table.write_text("Iface Destination Gateway Flags\neth0 0000000A 00000000 0001 0 0 0 0 0 0 0\n")
    assert router(table) == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(machine_facts, "_output_of", lambda *_: "  gateway: 10.0.0.254\n  x: y\n")
    assert router() == "10.0.0.254"
    monkeypatch.setattr(sys, "platform", "win32")
    assert router() == ""


def test_windows_is_asked_what_it_takes_the_network_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program of its own, which nobody else has."""
    assert gather_machine([]).network_category == ""
    asked: list[str] = []

    def answer(*command: str) -> str:
        asked.extend(command)
        return "Public\r\n"

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(machine_facts, "_output_of", answer)
    assert gather_machine([]).network_category == "Public"
    assert "(Get-NetConnectionProfile).NetworkCategory" in asked
