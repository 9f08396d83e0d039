"""Opening control connections: who is let in, and what members that lie or talk nonsense get."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from potluck.backend.port import NodePort
from potluck.cluster.cluster import AutoDiscoveryBackend
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.cluster.connections import REPORTS
from potluck.cluster.reports import StatusReport, StatusRequest, read_said, write
from potluck.discovery.records import job_tag
from potluck.errors import HandshakeRefused
from potluck.membership.messages import ProcessInfo, ProcessRole
from potluck.net.addresses import Address
from potluck.net.frames import FrameType, encode
from potluck.net.secure_socket import OpeningSocket
from potluck.wire_messages import ControlRequest, pack
from support.clusters import OPTIONS, new_job
from support.threads import eventually

SOON = 10.0  # seconds


@pytest.fixture
def node() -> Iterator[AutoDiscoveryBackend]:
    """A node that is alone."""
    with AutoDiscoveryBackend(AutoDiscoveryConfig(job=new_job(), **OPTIONS)) as backend:
        yield backend


@pytest.fixture
def stranger() -> Iterator[NodePort]:
    """Another process of the same namespace, which says what a test wants."""
    with NodePort() as port:
        yield port


def card(port: NodePort, **changes: object) -> ProcessInfo:
    """What that process should say of itself."""
    honest = ProcessInfo(
        node=port.process.node, incarnation=port.process.incarnation, port=port.port
    )
    return msgspec.structs.replace(honest, **changes)


def knock(
    port: NodePort, node: AutoDiscoveryBackend, said: bytes, job: str | None = None
) -> OpeningSocket:
    """Try to open a control connection."""
    tag = job_tag(port.members.security.namespace, node.job if job is None else job)
    where = Address("127.0.0.1", node.port)
    hello = ControlRequest(job=tag, card=said)
    return port.dial_control(where, None, hello, time.monotonic() + SOON)[0]


def test_an_honest_member_of_the_job_gets_a_connection(
    node: AutoDiscoveryBackend, stranger: NodePort
) -> None:
    """And is asked to found a cluster by heartbeats."""
    with closing(knock(stranger, node, pack(card(stranger)))) as connection:
        connection.settimeout(SOON)
        assert connection.recv(1000)


@pytest.mark.parametrize(
    ("changes", "job", "why"),
    [
        ({}, "another", "another job"),
        ({"node": "b" * 32}, None, "another node"),
        ({"incarnation": 5}, None, "different starts"),
    ],
    ids=["another job", "another node", "another start"],
)
def test_whoever_says_something_else_than_it_proved_is_refused(
    node: AutoDiscoveryBackend,
    stranger: NodePort,
    changes: dict[str, object],
    job: str | None,
    why: str,
) -> None:
    """With a sentence; the node goes on."""
    with pytest.raises(HandshakeRefused, match=why):
        knock(stranger, node, pack(card(stranger, **changes)), job).close()
    with closing(knock(stranger, node, pack(card(stranger)))):
        pass


def test_a_card_that_is_none_is_refused(node: AutoDiscoveryBackend, stranger: NodePort) -> None:
    """Whatever bytes a member sends."""
    for said in (b"", b"\xc1" * 100, b"\x80"):
        with pytest.raises(HandshakeRefused):
            knock(stranger, node, said).close()


@pytest.mark.parametrize("tag", [0, REPORTS, 77])
def test_nonsense_on_a_connection_ends_it(
    node: AutoDiscoveryBackend, stranger: NodePort, tag: int
) -> None:
    """The node survives it, and still answers others; an unknown tag is nobody's business."""
    with closing(knock(stranger, node, pack(card(stranger)))) as connection:
        connection.settimeout(SOON)
        connection.sendall(encode(FrameType.CONTROL, tag=tag, length=4) + b"\xc1\xc1\xc1\xc1")
        if tag != 77:
            while connection.recv(1 << 16):
                pass
    eventually(lambda: node.view is not None)
    assert node.health is not None


def test_an_observer_gets_a_report_and_does_not_count(
    node: AutoDiscoveryBackend, stranger: NodePort
) -> None:
    """Of any job: it only looks on."""
    node.wait_until_active(SOON)
    before = node.view
    said = pack(card(stranger, role=ProcessRole.OBSERVER))
    with closing(knock(stranger, node, said, "")) as connection:
        question = write(StatusRequest())
        connection.settimeout(SOON)
        connection.sendall(encode(FrameType.CONTROL, tag=REPORTS, length=len(question)) + question)
        data = b""
        while len(data) < 36 or len(data) < 36 + int.from_bytes(data[32:36], "little"):
            data += connection.recv(1 << 16)
        report = read_said(data[36:])
    assert isinstance(report, StatusReport)
    assert report.key == node.process
    assert (report.state, report.rank, report.job) == ("active", 0, node.job)
    assert node.view == before
