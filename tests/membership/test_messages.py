"""Which of two lineages stays, where its documentation shows no example."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._types import Branch, NodeId, ProcessId, View
from potluck.errors import MalformedFrame
from potluck.membership.messages import (
    MAX_CONTACTS,
    MAX_HOSTS,
    MAX_MEMBERS,
    MAX_MESSAGE,
    SENTENCE_LIMIT,
    Cause,
    CauseCode,
    Charter,
    Claim,
    ClusterMessage,
    Commit,
    Departed,
    Found,
    Heartbeat,
    KnownProcesses,
    Lost,
    MergeAnswer,
    MergeRequest,
    Phase,
    PreVote,
    ProcessInfo,
    ProcessRole,
    Proposal,
    Relayed,
    Vote,
    branch_off,
    clip,
    compare,
    decode,
    encode,
    mark,
    outranks,
)
from support.cluster_net import card

A, B = (Branch("a", 1),), (Branch("b", 1),)


def test_members_count_after_samples_and_the_lower_id_at_last() -> None:
    """What is not said counts as none."""
    assert outranks(Claim(B, members=2), Claim(A, samples=0, members=1))
    assert not outranks(Claim(A, members=9), Claim(B, samples=1))
    assert outranks(Claim(A, 5, 3), Claim(B, 5, 3))
    assert not outranks(Claim(B, 5, 3), Claim(A, 5, 3))
    assert not outranks(Claim(B), Claim(A, 0, 0))
    assert outranks(Claim(A), Claim(B, 0, 0))


def test_a_lineage_does_not_win_against_itself() -> None:
    """Two claims that say the same: neither outranks the other."""
    assert not outranks(Claim(A, 5, 3), Claim(A, 5, 3))


def test_a_living_ancestor_comes_before_a_child_of_the_same_epoch() -> None:
    """Whoever asks."""
    child = (Branch("a", 1), Branch("c", 7))
    assert (compare(A, child), compare(child, A)) == (1, -1)


def test_of_a_long_ancestry_the_newest_branches_are_kept() -> None:
    """32 of them, as many as a message may carry."""
    long = tuple(Branch(str(number), number) for number in range(32))
    child = branch_off(long, "x", 5)
    assert len(child) == 32
    assert child[-1] == Branch("x", 5)
    assert child[0] == long[1]


def test_the_lower_id_is_that_of_the_lineage_itself() -> None:
    """Not that of its first ancestor."""
    one, other = (Branch("a", 1), Branch("z", 1)), (Branch("b", 1), Branch("y", 1))
    assert outranks(Claim(other), Claim(one))
    assert not outranks(Claim(one), Claim(other))


# --------------------------------------------------------------------------------------------------
# Cluster messages and cards: what is encoded comes back, what is odd is refused.

MESSAGES_A = ProcessId(NodeId("a" * 32), 1)
MANY = tuple(ProcessId(NodeId("a" * 32), 1 << 61) for _ in range(MAX_MEMBERS))

MESSAGES: list[ClusterMessage] = [
    Heartbeat(1, 0, 0.5, Phase.ACTIVE, (1, 2), lineage="f" * 32, epoch=3, leader=MESSAGES_A),
    Heartbeat(2, 1, 0.0, Phase.JOINING, tuple(range(MAX_CONTACTS))),
    KnownProcesses((card("b", hosts=("10.0.0.1",), port=7, role=ProcessRole.OBSERVER),)),
    Lost("f" * 32, 3, MESSAGES_A, "its cable was pulled", is_proved=True),
    Departed("f" * 32, 3, 0, -1, None, "it left the job", is_leaving=True),
    Vote("f" * 32, 3, 1, True, 1, 0, Proposal(MANY, "x" * SENTENCE_LIMIT), MANY),
    Found("f" * 32, Proposal((MESSAGES_A,))),
    Relayed(MESSAGES_A, MESSAGES_A, encode(PreVote("f" * 32, 3, 1))),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_encoded_comes_back(message: ClusterMessage) -> None:
    """Also with as many members and characters as there may be."""
    assert decode(encode(message)) == message


def test_a_commit_knows_its_view() -> None:
    """Lineage, epoch and members in rank order."""
    assert Commit("f" * 32, 3, Proposal((MESSAGES_A,))).view == View("f" * 32, 3, (MESSAGES_A,))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    """Whatever arrives is a message or a clean refusal."""
    with contextlib.suppress(MalformedFrame):
        assert isinstance(decode(data), ClusterMessage)


@pytest.mark.parametrize(
    "odd",
    [
        ["heartbeat", -1, 0, 0.0, 1, []],
        ["heartbeat", 1, 0, 0.0, 9, []],
        ["heartbeat", 1, 0, 0.0, 1, list(range(MAX_CONTACTS + 1))],
        ["canvass", "f" * 33, 1, 1],
        ["canvass", "f" * 32, 1],
        ["canvass", "f" * 32, 1, 1, 1],
        ["lost", "f" * 32, 1, ["a", 1], "x" * (SENTENCE_LIMIT + 1)],
        ["commit", "f" * 32, 1, [[["a", 1]] * (MAX_MEMBERS + 1)]],
        ["unknown", 1],
    ],
)
def test_values_out_of_bounds_are_refused(odd: list[object]) -> None:
    """Counts, lists and sentences have limits; unknown kinds and fields do not pass."""
    with pytest.raises(MalformedFrame, match="not a cluster message"):
        decode(msgspec.msgpack.encode(odd))


def test_the_size_is_checked_first() -> None:
    """Nothing longer than the limit is decoded, and nothing longer is sent."""
    with pytest.raises(MalformedFrame, match="is the limit"):
        decode(bytes(MAX_MESSAGE + 1))
    cards = tuple(card("a", hosts=("h" * 255,) * 16) for _ in range(100))
    with pytest.raises(MalformedFrame, match="too long to send"):
        encode(KnownProcesses(cards))


def test_a_message_as_long_as_the_limit_is_sent_and_a_longer_one_is_not() -> None:
    """The sender finds out, not the receiver."""
    half = MAX_MESSAGE // 2
    envelope = len(encode(Relayed(MESSAGES_A, MESSAGES_A, bytes(half)))) - half
    longest = Relayed(MESSAGES_A, MESSAGES_A, bytes(MAX_MESSAGE - envelope))
    assert len(encode(longest)) == MAX_MESSAGE
    with pytest.raises(MalformedFrame, match="not a cluster message"):
        decode(bytes(MAX_MESSAGE))
    with pytest.raises(MalformedFrame, match="too long to send"):
        encode(Relayed(MESSAGES_A, MESSAGES_A, bytes(MAX_MESSAGE - envelope + 1)))


def test_long_sentences_are_clipped() -> None:
    """A reason that is too long travels without its end."""
    assert clip("short") == "short"
    assert len(clip("x" * 5000)) == SENTENCE_LIMIT
    assert clip("x" * SENTENCE_LIMIT) == "x" * SENTENCE_LIMIT


def test_a_card_succeeds_an_earlier_one_in_its_place() -> None:
    """Same machine, same slot, later start; anything else is somebody else."""
    old = card("a", 1, slot=2)
    assert card("a", 2, slot=2).succeeds(old)
    assert not card("a", 1, slot=2).succeeds(old)
    assert not card("a", 2, slot=3).succeeds(old)
    assert not card("a", 2, slot=2, machine="elsewhere").succeeds(old)
    assert not card("b", 2, slot=2).succeeds(old)


def test_cards_and_marks_are_for_people_and_for_lists() -> None:
    """A nameless process shows its id; marks differ."""
    assert str(ProcessInfo(node=NodeId("a" * 32), incarnation=7)) == "aaaaaaaa/7"
    assert mark(MESSAGES_A) != mark(ProcessId(MESSAGES_A.node, 2))
    assert 0 <= mark(MESSAGES_A) < 1 << 63


L = "f" * 32
WIRE_A = [MESSAGES_A.node, MESSAGES_A.incarnation]


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        (
            ["heartbeat", 1, 0, 0.5, 1, []],
            Heartbeat(
                sequence=1,
                echo=0,
                held=0.5,
                phase=Phase.JOINING,
                hears=(),
                samples=0,
                lineage="",
                epoch=0,
                view=0,
                size=0,
                leader=None,
                term=0,
                aborted=False,
                lost=None,
                orderly=False,
                wants=1,
                withholds=False,
                accepted=0,
                bound="",
                bound_epoch=0,
                ended=(),
                ancestry=(),
                lateness=0.0,
                pause_after=0.0,
            ),
        ),
        (
            ["lost", L, 3, WIRE_A, "why"],
            Lost(L, 3, MESSAGES_A, "why", is_proved=False, is_expelled=False),
        ),
        (
            ["departed", L, 3, 0, -1, None, "why"],
            Departed(L, 3, 0, -1, None, "why", is_leaving=False),
        ),
        (
            ["found", L, [[WIRE_A]]],
            Found(
                L,
                Proposal((MESSAGES_A,), "", "", 0, (), (), 0.0, 0.0, None),
                Charter("majority", (), ()),
                is_forced=False,
            ),
        ),
        (["merge", L, 3, "e"], MergeRequest(L, 3, "e", ancestry=(), samples=0, members=0)),
        (
            ["reserved", L, 3, "e", True, [WIRE_A]],
            MergeAnswer(L, 3, "e", True, (MESSAGES_A,), reason="", into_epoch=0, charter=Charter()),
        ),
        (
            ["commit", L, 3, [[WIRE_A], "", "", 0, [], [[WIRE_A, "silent"]]]],
            Commit(
                L,
                3,
                Proposal(
                    (MESSAGES_A,), causes=(Cause(MESSAGES_A, CauseCode.SILENT, "", "", 0.0, ""),)
                ),
                Charter(),
            ),
        ),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_what_a_message_does_not_say_counts_as_nothing(
    short: list[Any], whole: ClusterMessage
) -> None:
    """The shortest form of a message is understood by every version."""
    assert decode(msgspec.msgpack.encode(short)) == whole


def test_phases_and_limits_are_part_of_the_protocol() -> None:
    """A process with other numbers would misunderstand its peers, or refuse what they send."""
    names = ["WAITING", "JOINING", "ACTIVE", "PAUSED", "OBSERVING"]
    assert [(phase.name, phase.value) for phase in Phase] == list(zip(names, range(5), strict=True))
    limits = MAX_MEMBERS, MAX_CONTACTS, MAX_MESSAGE, SENTENCE_LIMIT, MAX_HOSTS
    assert limits == (256, 512, 61_440, 1000, 16)


def test_a_card_says_the_least_it_has_to() -> None:
    """What is not on it: the first slot, no port, and a second without contact."""
    short = {"node": MESSAGES_A.node, "incarnation": 1}
    read = msgspec.convert(short, ProcessInfo)
    assert read == ProcessInfo(node=MESSAGES_A.node, incarnation=1, slot=0, port=0, pause_after=1.0)
    assert (read.slot, read.port, read.pause_after) == (0, 0, 1.0)
    assert msgspec.to_builtins(read) == short


@pytest.mark.parametrize(
    ("fact", "most"), [("hosts", ["h" * 255] * 16), ("port", 65535), ("machine", "m" * 64)]
)
def test_a_card_with_more_than_fits_is_refused(fact: str, most: Any) -> None:
    """As much as fits is read."""
    facts = {"node": MESSAGES_A.node, "incarnation": 1}
    msgspec.convert({**facts, fact: most}, ProcessInfo)
    more = most + 1 if isinstance(most, int) else most + most[:1]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**facts, fact: more}, ProcessInfo)
    if fact == "hosts":
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**facts, "hosts": ["h" * 256]}, ProcessInfo)
