"""Two machines with two ways to each other: what answers is taken, in the order that measures."""

import json
import subprocess
import sys

import pytest

from support.hosts import Host, Hosts

pytestmark = pytest.mark.netns

LISTEN = """
import socket
listener = socket.create_server(("0.0.0.0", 5000), backlog=64)
print("listening", flush=True)
while True:
    listener.accept()[0].close()
"""

ORDER = """
import json, sys
from potluck.wire_messages import RankEndpoint
from potluck.cluster.topology import AddressRanking

clock = [0.0]
finder = AddressRanking(lambda: clock[0])
for line in sys.stdin:
    clock[0] += float(line)
    (peer,) = finder.sorted([RankEndpoint(json.loads(sys.argv[1]), 5000, "desk")])
    print(json.dumps(peer.hosts), flush=True)
"""


def second_cable(desk: Host, laptop: Host) -> str:
    """Join two hosts directly; the first one's address on that cable."""
    desk.ip(
        "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", laptop.namespace
    )
    for number, host in enumerate((desk, laptop), 1):
        host.ip("address", "add", f"10.67.0.{number}/24", "dev", "eth1")
        host.ip("link", "set", "eth1", "up")
    return "10.67.0.1"


def test_the_address_that_answers_comes_first() -> None:
    """One that does not answer comes last, and all are looked at again in time."""
    with Hosts("desk laptop") as hosts:
        desk, laptop = hosts.values()
        direct, nowhere = second_cable(desk, laptop), "10.66.0.99"
        told = json.dumps([nowhere, desk.ipv4, direct])
        listener, finder = (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for command in (
                desk.command([sys.executable, "-c", LISTEN]),
                laptop.command([sys.executable, "-c", ORDER, told]),
            )
        )
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "listening\n"

            def order_after(seconds: float) -> list[str]:
                assert finder.stdin is not None
                assert finder.stdout is not None
                print(seconds, file=finder.stdin, flush=True)
                found: list[str] = json.loads(finder.stdout.readline())
                return found

            first = order_after(0)
            assert (set(first[:2]), first[2]) == ({direct, desk.ipv4}, nowhere)
            desk.unplug()
            assert order_after(1) == first  # not measured again so soon
            assert order_after(100)[0] == direct
        finally:
            for process in (listener, finder):
                process.kill()
                process.communicate()
