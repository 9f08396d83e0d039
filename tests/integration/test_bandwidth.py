"""A probe beside iperf3, between emulated machines, at several rates."""

import json
import shutil
import subprocess
import sys

import pytest

from support.hosts import Host, Hosts

pytestmark = [pytest.mark.netns, pytest.mark.slow]

TRIES = 5

PROBE = """
import socket, sys, time
from potluck.backend.base import PeerStream
from potluck.net.tcp import make_poller
from potluck.net.tcp import TcpStream
from potluck.cluster.bandwidth import measure_bandwidth

def probe(line, first):
    stream, poller = TcpStream(line), make_poller()
    found = measure_bandwidth(PeerStream(stream), poller, first=first)
    stream.finish(time.monotonic() + 5)
    poller.close()
    print(found.up, found.down, flush=True)

if sys.argv[1] == "serve":
    listener = socket.create_server(("0.0.0.0", 5001))
    print("listening", flush=True)
    while True:
        probe(listener.accept()[0], first=False)
else:
    probe(socket.create_connection((sys.argv[1], 5001)), first=True)
"""


def probed(host: Host, server: Host) -> list[int]:
    """Bytes per second up and down, as we measure them."""
    return [int(x) for x in host.run([sys.executable, "-c", PROBE, server.ipv4]).stdout.split()]


def iperf(host: Host, server: Host, *extra: str) -> float:
    """Bytes per second, as iperf3 measures them within a second; 0 if it could not measure."""
    command = ["iperf3", "-c", server.ipv4, "-t", "1", "-J", *extra]
    report = json.loads(host.run(command).stdout)
    if "error" in report:  # for example, its server is still busy with the measurement before
        return 0.0
    rate: float = report["end"]["sum_received"]["bits_per_second"] / 8
    return rate


def agree(host: Host, server: Host) -> bool:
    """Whether both measure the same, one right after the other."""
    expected = [iperf(host, server), iperf(host, server, "-R")]
    return probed(host, server) == pytest.approx(expected, rel=0.15)


@pytest.mark.timeout(120)
def test_a_probe_agrees_with_iperf3() -> None:
    """Within 15 %, in both directions, at 50, 200 and 1000 Mbit/s."""
    if shutil.which("iperf3") is None:
        pytest.skip("the comparison needs the program iperf3")
    with Hosts("desk laptop") as hosts:
        desk, laptop = hosts.values()
        server = subprocess.Popen(
            desk.command([sys.executable, "-c", PROBE, "serve"]), stdout=subprocess.PIPE, text=True
        )
        other = subprocess.Popen(desk.command(["iperf3", "-s"]), stdout=subprocess.DEVNULL)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            for rate in ("50mbit", "200mbit", "1gbit"):
                hosts.limit("laptop", rate)
                # A machine that is busy with something else can slow down any one of either.
                assert any(agree(laptop, desk) for _ in range(TRIES)), rate
        finally:
            for process in (server, other):
                process.kill()
                process.wait()
            if server.stdout is not None:
                server.stdout.close()
