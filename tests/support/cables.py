"""The ways between emulated machines: each can be cut, in one direction or both, and mended."""

from __future__ import annotations

import json
from collections.abc import Iterable

from support.hosts import INTERFACE, Host

SET_UP = """
add table inet cables
add set inet cables cut { type ether_addr; }
add chain inet cables input { type filter hook input priority 0; }
add rule inet cables input ether saddr @cut drop
"""


class Cables:
    """Nobody is told when one is cut: packets no longer arrive, whatever address they are for."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        self._links: dict[str, str] = {}  # the link address of each host
        for host in hosts:
            shown = json.loads(host.run(["ip", "-json", "link", "show", INTERFACE]).stdout)
            self._links[host.name] = shown[0]["address"]
            host.run(["nft", SET_UP])

    def cut(self, sender: Host, receiver: Host) -> None:
        """Nothing that one sends reaches the other any more."""
        self._change("add", sender, receiver)

    def mend(self, sender: Host, receiver: Host) -> None:
        """It does again."""
        self._change("delete", sender, receiver)

    def _change(self, verb: str, sender: Host, receiver: Host) -> None:
        element = f"{{ {self._links[sender.name]} }}"
        receiver.run(["nft", f"{verb} element inet cables cut {element}"])
