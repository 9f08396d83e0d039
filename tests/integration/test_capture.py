"""What somebody who listens gets: every packet of a whole run, and nothing in it to use."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck import DistributedContext, RpcAgent, TcpBackend
from potluck.identity.namespace import NetworkNamespace
from support.hosts import Hosts
from support.paired_hosts import captured, home, pair, variables
from support.place import Place
from support.ranks import Ranks
from support.threads import PATIENCE

pytestmark = [pytest.mark.netns, pytest.mark.slow]

# Neither these nor the group's name are words of the list that codes are made of.
NAMES = "alpha beta"
CIRCLE = "zz-circle-of-zelda"
PAYLOAD = b"the weights of layer seven! "
SUM = b"all gradients taken together"  # a payload of its own, so that its control is its own too
WORDS = b"a question between machines "  # of the remote calls
SIZES = (1, 10, 1_000)  # repetitions: within the first packet, within one, over several


# --- what the two machines do while somebody listens; further kinds of traffic join the list ---


def send_messages(backend: TcpBackend) -> None:
    """Small and large messages, both ways."""
    peer = 1 - backend.rank
    for count in SIZES:
        inbox = bytearray(len(PAYLOAD) * count)
        arriving = backend.post_recv_into(inbox, peer)
        backend.send(PAYLOAD * count, peer, timeout=PATIENCE)
        arriving.wait(PATIENCE)
        assert inbox == PAYLOAD * count


def pass_barriers(backend: TcpBackend) -> None:
    """A few of them."""
    for _ in range(3):
        backend.barrier(PATIENCE)


def add_up(backend: TcpBackend) -> None:
    """Small and large sums, known to the listener, and so is what rank 0 adds to nothing."""
    context = DistributedContext(backend)
    for count in SIZES:
        share = SUM * count if backend.rank == 0 else bytes(len(SUM) * count)
        assert context.all_reduce(bytearray(share), dtype="uint8", timeout=PATIENCE) == SUM * count


def call_each_other(backend: TcpBackend) -> None:
    """Questions and answers, small and large, both ways at once."""
    with RpcAgent(backend) as agent:
        agent.register("echo", lambda data: data)
        backend.barrier(PATIENCE)
        for count in SIZES:
            answer = agent.rpc_sync(1 - backend.rank, "echo", WORDS * count, PATIENCE)
            assert answer == WORDS * count
        backend.barrier(PATIENCE)


ACTIVITIES: list[Callable[[TcpBackend], None]] = [
    send_messages,
    pass_barriers,
    add_up,
    call_each_other,
]


def take_part(place: Place, namespace: str) -> None:
    """Be one of the two ranks."""
    with place.join(namespace=namespace) as backend:
        for activity in ACTIVITIES:
            activity(backend)


def run_group(ranks: Ranks, hosts: Hosts, folder: Path, namespace: str) -> None:
    """Let a rank on each host do everything there is to do."""
    master = f"{hosts['alpha'].ipv4}:29500"
    started = []
    for rank, host in enumerate(hosts.values()):
        process = ranks.take(host.command, variables(folder, host, namespace))
        process.begin(take_part, rank, len(hosts), master, namespace)
        started.append(process)
    for process in started:
        process.value()


# --- what is looked for ---


def spellings(secret: bytes) -> list[bytes]:
    """A secret as it might be written, whole or in part."""
    written = [base64.b64encode(secret).rstrip(b"="), base64.b32encode(secret).rstrip(b"=")]
    return [secret, secret[:8], secret[-8:], secret.hex().encode(), *written]


def payload_spellings() -> list[bytes]:
    """Pieces of what was sent: a packet may begin or end anywhere."""
    return [part for sent in (PAYLOAD, SUM, WORDS) for part in (sent, sent[:14], sent[14:])]


def found(wanted: list[bytes], packets: bytes) -> list[bytes]:
    """Which of these were in the capture."""
    return [text for text in wanted if text in packets]


def test_a_capture_of_a_whole_run_holds_nothing_to_use(ranks: Ranks, tmp_path: Path) -> None:
    """Neither code nor secret nor payload nor the group's name; the two names are public."""
    file = tmp_path / "capture"
    with Hosts(NAMES) as hosts, captured(hosts["alpha"], file):
        alpha, beta = hosts.values()
        code = pair(tmp_path, alpha, beta, CIRCLE)
        run_group(ranks, hosts, tmp_path, CIRCLE)
        kept = [NetworkNamespace.load(CIRCLE, home=home(tmp_path, host)) for host in (alpha, beta)]
    packets = file.read_bytes()
    slot, *words = code.split("-")
    public = [b"_potluck-pair", f"slot={slot}".encode(), b"beta"]
    assert found(public, packets) == public
    assert kept[0] == kept[1]
    hidden = [*spellings(kept[0].secret), *payload_spellings(), CIRCLE.encode()]
    hidden += [word.encode() for word in words]
    assert found(hidden, packets) == []


def test_the_same_in_clear_is_found(ranks: Ranks, tmp_path: Path) -> None:
    """The control: the search finds what is there, so finding nothing means something."""
    file = tmp_path / "capture"
    with Hosts(NAMES) as hosts, captured(hosts["alpha"], file):
        run_group(ranks, hosts, tmp_path, "insecure")
    assert found(payload_spellings(), file.read_bytes()) == payload_spellings()
