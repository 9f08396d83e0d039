"""The decoders that take bytes from the network or from files, each with valid inputs."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from potluck import _values as potluck__values
from potluck._decode import decode_json
from potluck._types import Branch, NodeId, ProcessId
from potluck.apps.cli import run_places, trace_analysis
from potluck.arrays import trees
from potluck.cluster import reports
from potluck.cluster.metrics_endpoint import answer
from potluck.collective.fingerprint import NOTICE_SIZE, Notice, NoticeKind
from potluck.compression.compressor import CompressedGradient, GradientCompressor
from potluck.compression.sparse import Sparse
from potluck.discovery import local
from potluck.discovery.mdns import read_record
from potluck.errors import DistributedError, IoError, MalformedFrame
from potluck.membership import messages
from potluck.membership.messages import ProcessInfo
from potluck.membership.topology import Accelerator, NodeProfile
from potluck.net import frames
from potluck.net.frames import FrameType
from potluck.net.opening import Greeting
from potluck.net.secure_socket import Security
from potluck.net.tcp import EndpointHint
from potluck.net.tls import first_record_size, read_hello
from potluck.rpc.errors import RpcInvalidMessage
from potluck.rpc.protocol import CallFailure, RpcHello, RpcRequest, RpcResponse, error_of
from potluck.rpc.values import ValueCodec
from potluck.training import elastic, peer_messages
from potluck.training.balance import MemberCondition
from potluck.training.checkpoint_files import Manifest, Piece, digest
from potluck.training.state import Chunks, Replica, SyncPlan, Wishes
from potluck.trust import pairing_protocol
from potluck.trust.pairing_protocol import PUBLIC_LIMIT
from potluck.trust.roster import Roster
from potluck.wire_messages import (
    ControlReply,
    ControlRequest,
    Introduction,
    Join,
    OpenReply,
    OpenRequest,
    RankEndpoint,
    Sync,
    Table,
    Told,
    UnixSocketHint,
    pack,
    unpack,
)
from potluck.wire_messages import Hello as MessagesHello
from support.fuzzing import Target
from support.hostile_hellos import kinds
from support.machines import TOY_VERIFIER, machine
from support.tls_pair import CALLED, LAB, client_hello

OUR = (MalformedFrame,)
RPC_HELLO = len(RpcHello(1, 1, 1).pack())
PEER = RankEndpoint(["10.0.0.5", "fe80::1"], 29500, "desk", "a" * 32)
VALUE = {
    "step": 7,
    "seen": {1, 2, 1 << 70},
    "at": (0.5, None, "x"),
    (1, 2): [b"bytes", frozenset({3.0}), 1 + 2j],
}


def _introduced() -> list[bytes]:
    said = Introduction(b"r" * 32, "m" * 16, "b" * 16, 1, 77)
    return [
        pack(Join(rank=1, world_size=2, peer=PEER, introduction=said)),
        pack(
            OpenRequest(
                session=b"s" * 16, rank=1, to=0, shortcut=UnixSocketHint(b"n", b"t", ["a", "b"])
            )
        ),
        pack(Sync(introduction=said)),
        pack(ControlRequest(job="train", card=b"c" * 40, profile=b"p")),
    ]


def _control_seeds() -> list[bytes]:
    members = [reports.MemberLine("a" * 32, 1, "desk")]
    health = [reports.HealthLine("a" * 32, 1, "desk", "good", "it answers", 0.1)]
    report = reports.StatusReport(
        node="a" * 32, incarnation=3, name="desk", members=members, peers=health, facts={"s": "t"}
    )
    return [reports.write(report), reports.write(reports.StatusRequest())]


def _roster() -> bytes:
    return Roster.found(machine("desktop"), b"c" * 32, b"n" * 32).to_bytes()


def _tls(data: bytes) -> None:
    channel = _SECURITY.answer_channel("stranger")
    assert channel is not None
    channel.receive(data)


_SECURITY = Security(LAB, CALLED)


def _greet(data: bytes) -> None:
    greeting = Greeting()
    while data and greeting.wanted:
        part, data = data[: greeting.wanted], data[greeting.wanted :]
        greeting.receive(part)


def _record(data: bytes) -> None:
    fields = [each.partition(b"=") for each in data.split(b"\0")]
    read_record({key: value for key, _, value in fields}, ["10.0.0.5"], loopback=False)


def _frame(data: bytes) -> None:
    frames.decode(data.ljust(frames.HEADER_SIZE, b"\0"), 0, 1 << 16)


def training_targets() -> list[Target]:
    """What members of a training tell each other."""
    chunks = Chunks({"a": np.ones(3), "b": [1, np.zeros((2, 2), np.int8)]})
    place, told = ("f" * 32, 1, 2), elastic._ReportMessage
    facts = (place, place[:2], place, True, False, (Branch(place[0], 1),), 5, (), 5)
    away, ended = ProcessId(NodeId("b" * 32), 3), ProcessId(NodeId("c" * 32), 1)
    missing = ((away, "attic"),)
    report = told(*facts, missing, False, (ended,), ((0, 4),), 100, MemberCondition(), False, "a1")

    def plan(data: bytes) -> None:
        peer_messages._read(data, SyncPlan, 1, "a plan").layout.check(1 << 20)

    def standing(data: bytes) -> None:
        elastic.MemberReport.of(peer_messages._read(data, told, 1, "a report"))

    def reader(kind: Any) -> Callable[[bytes], object]:
        return lambda data: peer_messages._read(data, kind, 1, "a message")

    written = msgspec.msgpack.encode
    return [
        Target(
            "training plan",
            plan,
            (MalformedFrame,),
            [written(SyncPlan(chunks.layout, bytes(32)))],
            "msgpack",
        ),
        Target("training report", standing, (MalformedFrame,), [written(report)], "msgpack"),
        Target(
            "training replica",
            reader(Replica),
            (MalformedFrame,),
            [written(Replica(chunks.digest, "x86"))],
            "msgpack",
        ),
        Target(
            "training wishes", reader(Wishes), (MalformedFrame,), [written([0, 1, 2])], "msgpack"
        ),
    ]


def _notice(data: bytes) -> None:
    Notice.unpack(data[:NOTICE_SIZE].ljust(NOTICE_SIZE, b"\0"))


def _client_hello(data: bytes) -> None:
    first_record_size(data)
    read_hello(data)


def _known_peers(data: bytes) -> None:
    decode_json(data, local._Kept)


MANIFEST = Manifest(
    checkpoint="x",
    lineage="f" * 32,
    epoch=1,
    step=2,
    rank=0,
    world_size=1,
    begins=0,
    size=8,
    checksums=("c" * 8,),
    pieces=(Piece("a", "F32", (2,), 0, 2, 0),),
    shape=potluck__values.encode([]),
).encode()


def _manifest_line(data: bytes) -> bytes:
    """A manifest whose checksum is right, whatever is in it."""
    head, _, text = MANIFEST.partition(b"\n")
    magic = head[: head.rindex(digest(text).encode())]
    return magic + digest(data).encode() + b"\n" + data


def _values(value: object) -> bytes:
    return b"".join(bytes(part) for part in ValueCodec().pack(value))


def _sized(data: bytes) -> bytes:
    """Values whose description has the length that it claims."""
    return struct.pack("<I", max(0, len(data) - 4)) + data[4:]


def _failure(data: bytes) -> None:
    error_of(RpcResponse(1, error="ValueError: x", facts=data), 3)


def _sparse(data: bytes) -> None:
    Sparse.unpack(np.frombuffer(data, np.uint8), 1000).dense()


def _gradient(data: bytes) -> None:
    CompressedGradient.from_bytes(data, most_values=1 << 20)


A = ProcessId(NodeId("a" * 32), 1)
NOTE = {
    "place": "p",
    "tag": "t",
    "job_tag": "j",
    "node": "n",
    "incarnation": 5,
    "version": 1,
    "port": 29500,
    "hosts": ["127.0.0.1"],
}
KNOWN = [
    {"node": "a" * 32, "job_tag": "j", "name": "desk", "addresses": [["10.0.0.5", 1]], "when": 1.0}
]
HEADER = {"potluck_trace": 1, "monotonic": 1.0, "wall": 2.0, "process": "p", "name": "desk"}
RECORD = {"lane": "l", "what": "all_reduce", "begin": 1.0, "end": 2.0, "waited": {"1": 0.5}}


def _cluster_seeds() -> list[bytes]:
    return [
        messages.encode(each)
        for each in (
            messages.Heartbeat(
                1, 0, 0.5, messages.Phase.ACTIVE, (1, 2), lineage="f" * 32, leader=A
            ),
            messages.KnownProcesses(
                (ProcessInfo(node=NodeId("b" * 32), incarnation=1, name="desk"),)
            ),
            messages.Lost("f" * 32, 3, A, "its cable was pulled", is_proved=True),
            messages.Departed("f" * 32, 3, 0, -1, None, "it left", is_leaving=True),
            messages.Found("f" * 32, messages.Proposal((A,), "because")),
            messages.PreVote("f" * 32, 3, 1),
        )
    ]


def _pairing() -> list[bytes]:
    me = machine("desktop")
    return [
        pairing_protocol.encode(each)
        for each in (
            pairing_protocol.PairingHello(1, 7, me.node_id, "desk", b"A" + bytes(32)),
            pairing_protocol.Reply(me.node_id, "desk", b"B" + bytes(32)),
            pairing_protocol.Confirm(bytes(32)),
            pairing_protocol.EncryptedMessage(bytes(100)),
        )
    ]


def _sealed() -> list[bytes]:
    me = machine("desktop")
    offer = pairing_protocol.NamespaceOffer(
        "home", bytes(32), b"roster", me.card.public_key, bytes(64)
    )
    return [pairing_protocol.encode(offer), pairing_protocol.encode(pairing_protocol.Decline())]


def _gradient_seed() -> bytes:
    return GradientCompressor("topk:0.1").compress(np.arange(64, dtype=np.float32)).to_bytes()


def targets() -> list[Target]:
    """All of them."""
    hello = frames.encode(FrameType.HELLO, length=4) + b"abcd"
    sparse = Sparse(1000, np.array([1, 5, 900], np.uint32), np.ones(3, np.float32)).pack()
    card = ProcessInfo(node=NodeId("a" * 32), incarnation=7, name="attic", hosts=("10.0.0.1",))
    record = b"\0".join(
        (b"v=1", b"t=" + b"a" * 26, b"n=" + b"a" * 32, b"i=5", b"j=" + b"b" * 8, b"p=29500")
    )
    return [
        Target("hello", lambda d: unpack(d, MessagesHello), OUR, _introduced(), "msgpack"),  # type: ignore[arg-type]
        Target(
            "table", lambda d: unpack(d, Table), OUR, [pack(Table(b"s" * 16, [PEER]))], "msgpack"
        ),
        Target("told", lambda d: unpack(d, Told), OUR, [pack(Told(b"r" * 99, b"s"))], "msgpack"),
        Target("lane opened", lambda d: unpack(d, OpenReply), OUR, [pack(OpenReply(3))], "msgpack"),
        Target(
            "control opened",
            lambda d: unpack(d, ControlReply),
            OUR,
            [pack(ControlReply(job="train", card=b"c"))],
            "msgpack",
        ),
        Target("card", lambda d: unpack(d, ProcessInfo), OUR, [pack(card)], "msgpack"),
        Target(
            "profile",
            NodeProfile.from_bytes,
            OUR,
            [NodeProfile(host="attic", cores=8, accelerators=(Accelerator("cuda"),)).to_bytes()],
            "msgpack",
        ),
        Target("report", reports.read_said, OUR, _control_seeds(), "msgpack"),
        Target("cluster", messages.decode, OUR, _cluster_seeds(), "msgpack", weight=2),
        Target(
            "pairing",
            lambda d: pairing_protocol.decode(d, PUBLIC_LIMIT),
            OUR,
            _pairing(),
            "msgpack",
        ),
        Target(
            "last words",
            lambda d: decode_json(d, run_places.ScriptError),
            (msgspec.DecodeError,),
            [msgspec.json.encode(run_places.ScriptError("ValueError", "m", "a.py:1", False, "t"))],
            "json",
        ),
        Target("pairing, sealed", pairing_protocol.decode_secret, OUR, _sealed(), "msgpack"),
        Target(
            "roster",
            lambda d: Roster.from_bytes(d, TOY_VERIFIER),
            OUR,
            [_roster()],
            "msgpack",
            weight=0.3,
        ),
        Target(
            "object",
            potluck__values.decode,
            OUR,
            [potluck__values.encode(VALUE)],
            "msgpack",
            weight=3,
        ),
        Target(
            "call values",
            ValueCodec().unpack,
            (RpcInvalidMessage,),
            [_values([VALUE, np.arange(6).reshape(2, 3)]), _values(((1, "a"), {"key": 2.0}))],
            "bytes",
            weight=2,
            repair=_sized,
            lead=4,
        ),
        Target(
            "call values, described",
            ValueCodec().unpack,
            (RpcInvalidMessage,),
            [_values([VALUE, (1, {2: 3})])],
            "msgpack",
            weight=2,
            repair=_sized,
            lead=4,
        ),
        Target(
            "call failure",
            _failure,
            (),
            [msgspec.msgpack.encode(CallFailure("raised", "w", "n"))],
            "msgpack",
        ),
        Target(
            "request",
            RpcRequest.deserialize,
            (RpcInvalidMessage,),
            [RpcRequest(1, "f", b"x").serialize()],
        ),
        Target(
            "response",
            RpcResponse.deserialize,
            (RpcInvalidMessage,),
            [RpcResponse(1, b"x").serialize()],
        ),
        Target(
            "call hello",
            lambda d: RpcHello.unpack(d[:RPC_HELLO].ljust(RPC_HELLO, b"\0")),
            (RpcInvalidMessage,),
            [RpcHello(8, 1 << 20, 1 << 30).pack()],
        ),
        Target("frame", _frame, (DistributedError,), [hello]),
        Target("greeting", _greet, (DistributedError,), [hello]),
        Target("client hello", _client_hello, (), [client_hello(), *(data for _, data in kinds())]),
        Target("TLS", _tls, (DistributedError,), [client_hello()], weight=0.05),
        Target("discovery record", _record, (), [record]),
        Target("notice", _notice, (), [Notice(NoticeKind.LOST, 1, 2, text="why").pack()]),
        Target(
            "whereabouts",
            lambda d: EndpointHint.from_bytes(d, "x"),
            OUR,
            [EndpointHint("m", ["10.0.0.5"], [29500]).to_bytes()],
            "json",
        ),
        Target(
            "known peers",
            _known_peers,
            (msgspec.DecodeError,),
            [msgspec.json.encode(KNOWN)],
            "json",
        ),
        Target(
            "neighbour",
            lambda d: local._parse(d, "5.json"),
            (),
            [msgspec.json.encode(NOTE)],
            "json",
        ),
        Target(
            "manifest",
            lambda d: Manifest.decode(_manifest_line(d)),
            (IoError,),
            [MANIFEST.partition(b"\n")[2]],
            "json",
        ),
        Target(
            "tree",
            lambda d: trees.read(d, {}),
            (DistributedError,),
            [trees.written({"a": [1, (2, "x")]})[0]],
            "msgpack",
        ),
        *training_targets(),
        Target(
            "trace header",
            trace_analysis._headers.decode,
            (msgspec.DecodeError,),
            [msgspec.json.encode(HEADER)],
            "json",
        ),
        Target(
            "trace record",
            trace_analysis._records.decode,
            (msgspec.DecodeError,),
            [msgspec.json.encode(RECORD)],
            "json",
        ),
        Target("sparse gradient", _sparse, OUR, [sparse.tobytes()]),
        Target("compressed gradient", _gradient, OUR, [_gradient_seed()]),
        Target(
            "request for metrics",
            lambda d: answer(d, bytes, local=True),
            (),
            [b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"],
        ),
    ]
