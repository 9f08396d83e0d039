"""Signs of life: whether a machine whose port is silent is on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from potluck.runtime.diagnosis import life
from potluck.runtime.diagnosis.life import signs_of_life


def test_signs_of_life_are_looked_for_on_other_doors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A refusal, an answer, a network card; or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        number = door.getsockname()[1]
        monkeypatch.setattr(life, "DOORS", (number,))
        assert signs_of_life("127.0.0.1") == f"it answers on port {number}"
    assert signs_of_life("127.0.0.1") == f"it refuses port {number} at once"
    monkeypatch.setattr(life, "DOORS", ())
    arp = tmp_path / "arp"
    arp.write_text(
        "IP address       HW type     Flags       HW address            Mask     Device\n"
        "10.0.0.2         0x1         0x2         02:fc:00:00:00:05     *        eth0\n"
        "10.0.0.3         0x1         0x0         00:00:00:00:00:00     *        eth0\n"
    )
    assert "02:fc:00:00:00:05" in signs_of_life("10.0.0.2", arp=arp)
    assert signs_of_life("10.0.0.3", arp=arp) == ""
    assert signs_of_life("10.0.0.4", arp=tmp_path / "missing") == ""
