"""What this version writes, on the wire and on disk, as files that later versions must read.

Each example is made with fixed values and has a file in ``tests/golden``.  A change of a format is
seen there as a change of bytes.  ``PYTHONPATH=tests python -m support.golden`` writes the files
that are missing; an existing one is never written again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from potluck import _values as potluck__values
from potluck._decode import decode_json
from potluck._types import Branch, NodeId, ProcessId
from potluck.arrays import trees
from potluck.cluster import reports
from potluck.cluster.reports import EpochLine, EventLine, Journal, LinkLine
from potluck.cluster.topology import KeptLink
from potluck.collective.fingerprint import Notice, NoticeKind
from potluck.discovery.local import KnownPeers
from potluck.discovery.records import Advert, Sighting, job_tag
from potluck.identity.namespace import NetworkNamespace
from potluck.membership import messages as membership
from potluck.membership.messages import ProcessInfo
from potluck.membership.topology import Accelerator, Battery, LinkSource, Medium, NodeProfile
from potluck.net import frames
from potluck.net.addresses import Address
from potluck.net.tcp import EndpointHint
from potluck.rpc.protocol import CallFailure, RpcHello, RpcRequest, RpcResponse
from potluck.training import elastic
from potluck.training.balance import MemberCondition
from potluck.training.checkpoint import Checkpointer
from potluck.training.checkpoint_files import Manifest, Piece
from potluck.training.state import Chunks, Replica, SyncPlan
from potluck.trust import pairing_protocol as pairing
from potluck.trust.roster import Roster
from potluck.trust.roster_records import commitment_to
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
from support.machines import TOY_VERIFIER, machine

FOLDER = Path(__file__).parent.parent / "golden"
HOME = FOLDER / "home"
WHEN = 1_000_000.0
STATE: dict[str, Any] = {
    "model": {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(2)},
    "steps": 3,
    "betas": (0.9, None),
}

A, B = ProcessId(NodeId("a" * 32), 1), ProcessId(NodeId("b" * 32), 7)
LINEAGE = "f" * 32
BRANCH = Branch("e" * 32, 4)
SAID = Introduction(b"r" * 32, "m" * 16, "b" * 16, 1, 77)
PEER = RankEndpoint(["10.0.0.5", "fe80::1"], 29500, "desk", "a" * 32)
CARD = ProcessInfo(node=NodeId("a" * 32), incarnation=7, name="attic", hosts=("10.0.0.1",))
CAUSE = membership.Cause(B, membership.CauseCode.SILENT, "attic", "10.0.0.2", 3.5, "no heartbeat")
CHARTER = membership.Charter("any", (BRANCH,), (BRANCH,))
PROPOSAL = membership.Proposal((A, B), "a newcomer", "d" * 32, 2, (B,), (CAUSE,), 0.5, 2.5, CHARTER)
VALUE = {"step": 7, "big": 1 << 70, "at": (0.5, None, "x"), "bytes": [b"raw", True]}


@dataclass(frozen=True)
class Example:
    """One message or file: how it is made, and how its bytes are read and written again."""

    name: str
    made: bytes
    again: Callable[[bytes], bytes]


def _frames() -> Iterator[Example]:
    def again(data: bytes) -> bytes:
        return _frame(frames.decode(data, 0, 1 << 20))

    for kind in frames.FrameType:
        length = 40 if kind is frames.FrameType.EAGER else 4
        made = frames.encode(kind, group=1, epoch=2, tag=3, operation=4, piece=5, length=length)
        yield Example(f"frame-{kind.name.lower()}", made, again)


def _frame(header: frames.Header) -> bytes:
    fields = header._asdict()
    kind = fields.pop("kind")
    return frames.encode(frames.FrameType(kind), **fields)


def _openings() -> Iterator[Example]:
    hellos = {
        "join": Join(rank=1, world_size=2, peer=PEER, introduction=SAID),
        "lane": OpenRequest(
            session=b"s" * 16, rank=1, to=0, shortcut=UnixSocketHint(b"n", b"t", ["a", "b"])
        ),
        "sync": Sync(introduction=SAID),
        "control": ControlRequest(job="train", card=b"c" * 40, profile=b"p"),
    }
    read_hello: Any = MessagesHello
    for name, message in hellos.items():
        yield Example(f"opening-{name}", pack(message), lambda d: pack(unpack(d, read_hello)))
    answers: dict[str, msgspec.Struct] = {
        "table": Table(b"s" * 16, [PEER]),
        "told": Told(b"r" * 99, b"s"),
        "lane-opened": OpenReply(3),
        "control-opened": ControlReply(job="train", card=b"c"),
        "process-card": CARD,
    }
    for name, answer in answers.items():
        kind = type(answer)
        yield Example(
            f"opening-{name}",
            pack(answer),
            lambda d, kind=kind: pack(unpack(d, kind)),  # type: ignore[misc]
        )


def _membership() -> Iterator[Example]:
    messages = (
        membership.Heartbeat(1, 0, 0.5, membership.Phase.ACTIVE, (1, 2), lineage=LINEAGE, leader=A),
        membership.KnownProcesses((CARD,)),
        membership.Lost(LINEAGE, 3, A, "its cable was pulled", is_proved=True, is_expelled=True),
        membership.Departed(LINEAGE, 3, 2, 1, PROPOSAL, "it left", is_leaving=True),
        membership.Found(LINEAGE, PROPOSAL, CHARTER, is_forced=True),
        membership.Founded(LINEAGE, is_agreed=True, reason="agreed"),
        membership.MergeRequest(LINEAGE, 3, "d" * 32, (BRANCH,), 100, 2),
        membership.MergeAnswer(LINEAGE, 3, "d" * 32, True, (A, B), "yes", 4, CHARTER),
        membership.Relayed(A, B, b"content"),
        membership.PreVote(LINEAGE, 3, 1),
        membership.PreVoteReply(LINEAGE, 3, 1, True, 0, (A,), "because"),
        membership.VoteRequest(LINEAGE, 3, 1),
        membership.Vote(LINEAGE, 3, 1, True, 1, 0, PROPOSAL, (A,)),
        membership.Propose(LINEAGE, 3, 1, PROPOSAL),
        membership.Accepted(LINEAGE, 3, 1, True, 1, (A,), (B,)),
        membership.Commit(LINEAGE, 3, PROPOSAL, CHARTER),
    )
    for message in messages:
        tag = type(message).__struct_config__.tag
        made = membership.encode(message)
        yield Example(f"membership-{tag}", made, lambda d: membership.encode(membership.decode(d)))


def _reports() -> Iterator[Example]:
    report = reports.StatusReport(
        node="a" * 32,
        incarnation=3,
        name="desk",
        members=[reports.MemberLine("a" * 32, 1, "desk")],
        peers=[reports.HealthLine("a" * 32, 1, "desk", "good", "it answers", 0.1)],
        missing=[reports.MissingLine("b" * 32, 1, "attic", 2.5)],
        facts={"script": "train.py"},
    )
    journal = Journal(
        node="a" * 32,
        incarnation=3,
        events=[EventLine(1, 2.0, "attic joined")],
        epochs=[EpochLine(1, 2.0, ["desk", "attic"], "founded", LINEAGE)],
        up=5,
        down=6,
        latency=[1, 2],
    )
    for message in (reports.StatusRequest(4), reports.ContinueRequest("train"), report, journal):
        tag = type(message).__struct_config__.tag
        made = reports.write(message)
        yield Example(f"control-{tag}", made, lambda d: reports.write(reports.read_said(d)))


def _pairing() -> Iterator[Example]:
    me = machine("desktop")
    key = me.card.public_key
    public = (
        pairing.PairingHello(1, 7, me.node_id, "desk", b"A" + bytes(32)),
        pairing.Reply(me.node_id, "desk", b"B" + bytes(32)),
        pairing.Confirm(bytes(32)),
        pairing.EncryptedMessage(bytes(100)),
        pairing.PairingRefused(next(iter(pairing.Refusal))),
    )
    for message in public:
        tag = type(message).__struct_config__.tag
        made = pairing.encode(message)
        yield Example(
            f"pairing-{tag}",
            made,
            lambda d: pairing.encode(pairing.decode(d, pairing.PUBLIC_LIMIT)),
        )
    secret = (
        pairing.NamespaceOffer("home", bytes(32), b"roster", key, bytes(64)),
        pairing.Accept(me.node_id, key, bytes(64)),
        pairing.Decline(),
        pairing.Admitted(b"roster"),
    )
    for hidden in secret:
        tag = type(hidden).__struct_config__.tag
        made = pairing.encode(hidden)
        yield Example(f"pairing-{tag}", made, lambda d: pairing.encode(pairing.decode_secret(d)))


def _calls() -> Iterator[Example]:
    request = RpcRequest(1, "f", b"x").serialize()
    yield Example("call-request", request, lambda d: RpcRequest.deserialize(d).serialize())
    response = RpcResponse(1, b"x").serialize()
    yield Example("call-response", response, lambda d: RpcResponse.deserialize(d).serialize())
    hello = RpcHello(8, 1 << 20, 1 << 30).pack()
    yield Example("call-hello", hello, lambda d: RpcHello.unpack(d).pack())
    failure = msgspec.msgpack.encode(CallFailure("raised", "w", "n"))
    yield Example("call-failure", failure, _same_struct(CallFailure))


def _training() -> Iterator[Example]:
    chunks = Chunks({"a": np.ones(3), "b": [1, np.zeros((2, 2), np.int8)]})
    place, told = (LINEAGE, 1, 2), elastic._ReportMessage
    facts = (place, place[:2], place, True, False, (Branch(LINEAGE, 1),), 5, (), 5)
    report = told(
        *facts, ((B, "attic"),), False, (), ((0, 4),), 100, MemberCondition(), False, "a1"
    )
    for name, message in {
        "plan": SyncPlan(chunks.layout, bytes(32)),
        "replica": Replica(bytes(16), "x86"),
        "report": report,
    }.items():
        made = msgspec.msgpack.encode(message)
        yield Example(f"training-{name}", made, _same_struct(type(message)))


def _same_struct(kind: Any) -> Callable[[bytes], bytes]:
    return lambda data: msgspec.msgpack.encode(msgspec.msgpack.decode(data, type=kind))


def _values() -> Iterator[Example]:
    made = potluck__values.encode(VALUE)
    yield Example(
        "values-object", made, lambda d: potluck__values.encode(potluck__values.decode(d))
    )
    tree = {"a": [1, (2, "x")]}
    yield Example(
        "values-tree", trees.written(tree)[0], lambda d: trees.written(trees.read(d, {}))[0]
    )
    profile = NodeProfile(host="attic", cores=8, accelerators=(Accelerator("cuda"),))
    yield Example(
        "node-profile", profile.to_bytes(), lambda d: NodeProfile.from_bytes(d).to_bytes()
    )
    wireless = NodeProfile(host="couch", medium=Medium("wireless", 7, 9), battery=Battery(80))
    yield Example(
        "node-profile-wireless", wireless.to_bytes(), lambda d: NodeProfile.from_bytes(d).to_bytes()
    )
    line = LinkLine(5, 1, 0.25, 2.0, "probe", 7, 8, 3.0, "bench", interface="wlan0")
    report = reports.StatusReport(
        node="b" * 32,
        incarnation=3,
        peers=[reports.HealthLine("a" * 32, 1, "desk", link=line)],
        medium=Medium("wireless", 7, 9),
        battery=Battery(80),
    )
    yield Example(
        "control-report-links", reports.write(report), lambda d: reports.write(reports.read_said(d))
    )
    link = KeptLink("a" * 32, 5, 1, 1e9, LinkSource.PROBE, 7, 8, 1e9, LinkSource.COLLECTIVES)
    yield Example(
        "kept-links",
        msgspec.json.encode([link]),
        lambda d: msgspec.json.encode(decode_json(d, list[KeptLink])),
    )
    where = EndpointHint("m", ["10.0.0.5"], [29500])
    yield Example(
        "whereabouts", where.to_bytes(), lambda d: EndpointHint.from_bytes(d, "a peer").to_bytes()
    )
    notice = Notice(NoticeKind.LOST, 1, 2, text="why")
    yield Example("notice", notice.pack(), _notice_again)


def _notice_again(data: bytes) -> bytes:
    notice = Notice.unpack(data)
    assert notice is not None
    return notice.pack()


def _files() -> Iterator[Example]:
    roster = Roster.found(machine("desktop"), b"c" * 32, b"n" * 32)
    yield Example(
        "file-roster", roster.to_bytes(), lambda d: Roster.from_bytes(d, TOY_VERIFIER).to_bytes()
    )
    manifest = Manifest(
        checkpoint="x",
        lineage=LINEAGE,
        epoch=1,
        step=2,
        rank=0,
        world_size=1,
        begins=0,
        size=8,
        checksums=("c" * 8,),
        pieces=(Piece("a", "F32", (2,), 0, 2, 0),),
        shape=potluck__values.encode([]),
    )
    yield Example("file-manifest", manifest.encode(), lambda d: Manifest.decode(d).encode())


def derived(namespace: NetworkNamespace) -> dict[str, str]:
    """What a namespace shows of its secret, and the tag of a job."""
    return {
        "discovery tag": namespace.discovery_tag,
        "job tag": job_tag(namespace, "train.py"),
        "subkey": namespace.subkey("golden", 32).hex(),
        "commitment": commitment_to(namespace.secret).hex(),
    }


def write_home(home: Path) -> None:
    """What a machine keeps: a namespace, the peers it knows, and a checkpoint."""
    namespace = NetworkNamespace("lab", b"s" * 32, (b"p" * 32,), home=home)
    namespace.save()
    advert = Advert.of(namespace, A, job="train.py", port=29500)
    seen = Sighting(
        key="b",
        sources=("mdns",),
        node=B.node,
        incarnation=7,
        job_tag=advert.job_tag,
        version=0,
        addresses=(Address("10.0.0.2", 29500),),
        name="attic",
    )
    KnownPeers(home, clock=lambda: WHEN).remember(advert, [seen])
    with Checkpointer(home / "checkpoints", rank=0, world_size=1) as saver:
        saver.save(STATE, 3, lineage=LINEAGE, epoch=2)


def files_of(home: Path) -> dict[str, bytes]:
    """Every file below a folder that says something."""
    return {
        path.relative_to(home).as_posix(): path.read_bytes()
        for path in sorted(home.rglob("*"))
        if path.is_file() and not path.name.endswith("lock")
    }


def examples() -> list[Example]:
    """All of them."""
    return [
        *_frames(),
        *_openings(),
        *_membership(),
        *_reports(),
        *_pairing(),
        *_calls(),
        *_training(),
        *_values(),
        *_files(),
    ]


def main() -> None:
    """Write the files that are missing."""
    FOLDER.mkdir(exist_ok=True)
    for example in examples():
        file = FOLDER / f"{example.name}.bin"
        if not file.exists():
            file.write_bytes(example.made)
    keys = FOLDER / "derived.json"
    if not keys.exists():
        values = derived(NetworkNamespace("lab", b"s" * 32))
        keys.write_bytes(msgspec.json.format(msgspec.json.encode(values)) + b"\n")
    if not HOME.exists():
        with tempfile.TemporaryDirectory() as folder:
            write_home(Path(folder))
            for name, content in files_of(Path(folder)).items():
                file = HOME / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)


if __name__ == "__main__":
    main()
