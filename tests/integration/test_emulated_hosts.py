"""The emulated machines themselves: a test that stands on them is worth what they are."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.hosts import Host, Hosts
from support.threads import PATIENCE, eventually

pytestmark = pytest.mark.netns

SERVER = """
import socket, sys
listener = socket.create_server(("::", 5000), family=socket.AF_INET6, dualstack_ipv6=True)
print("listening", flush=True)
while True:
    line = listener.accept()[0]
    while line.recv(1 << 20):
        pass
    line.sendall(b"all")
    line.close()
"""

CLIENT = """
import socket, sys, time
line = socket.create_connection((sys.argv[1], 5000))
peer, begin = line.getpeername()[0], time.monotonic()
line.sendall(bytes(int(sys.argv[2])))
line.shutdown(socket.SHUT_WR)
assert line.recv(3) == b"all"
print(socket.gethostname(), peer, time.monotonic() - begin)
"""


def send(source: Host, target: str, count: int) -> list[str]:
    """Send bytes to a server; who sent, where that was, and the seconds it took."""
    return source.run([sys.executable, "-c", CLIENT, target, str(count)]).stdout.split()


def start_server(host: Host) -> subprocess.Popen[str]:
    """A server that is ready; it ends with its host."""
    command = host.command([sys.executable, "-c", SERVER])
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    return server


def test_hosts_reach_each_other_by_address_and_by_name() -> None:
    """With IPv4, with IPv6, and as somebody would type it."""
    with Hosts("desk laptop") as hosts:
        desk, laptop = hosts.values()
        server = start_server(desk)
        assert send(laptop, desk.ipv4, 10)[:2] == ["laptop", desk.ipv4]
        assert send(laptop, desk.ipv6, 10)[:2] == ["laptop", desk.ipv6]
        assert send(laptop, "desk", 10)[0] == "laptop"
    with server:
        assert server.wait(PATIENCE) == -signal.SIGKILL


def test_a_rate_holds_in_both_directions() -> None:
    """One megabyte at eight megabits takes a second, whichever end is limited."""
    with Hosts("slow fast") as hosts:
        slow, fast = hosts.values()
        hosts.limit("slow", "8mbit")
        servers = [start_server(host) for host in (slow, fast)]
        assert 0.6 < float(send(slow, fast.ipv4, 1_000_000)[2]) < 4
        assert 0.6 < float(send(fast, slow.ipv4, 1_000_000)[2]) < 4
    for server in servers:
        with server:
            server.wait(PATIENCE)


CRASH = """
import sys, time
from support.hosts import Hosts
hosts = Hosts("desk laptop").__enter__()
print(hosts["desk"].namespace, flush=True)
time.sleep(60)
"""


def test_what_a_dead_process_left_is_removed_by_the_next() -> None:
    """Killing a run of the tests leaves nothing for good."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", CRASH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as maker:
        assert maker.stdout is not None
        left = maker.stdout.readline().strip()
        maker.kill()
    assert left in namespaces()
    with Hosts("desk") as hosts:
        assert hosts["desk"].namespace in namespaces()
        assert left not in namespaces()
    assert hosts["desk"].namespace not in namespaces()


def namespaces() -> list[str]:
    """The namespaces there are."""
    return [path.name for path in Path("/run/netns").iterdir()]


def test_silence_and_a_pulled_cable_look_like_the_real_thing() -> None:
    """Who dials a host that drops packets learns nothing until its own time is up."""
    with Hosts("desk laptop mac") as hosts:
        desk, laptop, mac = hosts.values()
        server = start_server(desk)
        desk.refuse_silently(laptop)
        dial = f"import socket; socket.create_connection(('{desk.ipv4}', 5000), timeout=0.5)"
        for _ in range(2):
            begin = time.monotonic()
            failed = laptop.run([sys.executable, "-c", dial], check=False)
            assert "TimeoutError" in failed.stderr
            assert time.monotonic() - begin >= 0.5
            assert send(mac, desk.ipv4, 10)[0] == "mac"
        mac.unplug()
        eventually(lambda: not reaches(mac, dial))
    with server:
        server.wait(PATIENCE)


def reaches(host: Host, dial: str) -> bool:
    """Whether a program on a host can connect."""
    return host.run([sys.executable, "-c", dial], check=False).returncode == 0
