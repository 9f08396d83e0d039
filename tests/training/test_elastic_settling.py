"""What members tell each other, before a step and when a view begins."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from potluck import (
    BackendUnavailable,
    CollectiveMismatch,
    DistributedContext,
    MalformedFrame,
    SimulatedBackend,
)
from potluck.core.ancestry import MAX_BRANCHES, Branch
from potluck.core.histories import Milestone
from potluck.core.steps import FRESH, Action, Decision, Position, Report
from potluck.training.elastic_ground import Ground
from potluck.training.elastic_record import Record, check_records
from potluck.training.elastic_settling import Settlement, Standing, settle
from potluck.training.shares import Condition
from potluck.vocabulary import NodeId, ProcessId, View
from support.clusters import clusters


def test_a_newcomer_that_finds_nobody_with_the_state_says_so() -> None:
    """It does not begin anew where others may have been training."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        late = View("f" * 32, 7, (ProcessId(NodeId("a" * 32), 1),))
        with pytest.raises(BackendUnavailable, match=r"never had the state.*are gone.*begins anew"):
            settle(alone, late, Standing(Report(), (), 0, Condition()))


class Other(DistributedContext):
    """A group of two, in which the other one says something of the test's choice."""

    said: Any = None
    rank, world_size = 0, 2

    def all_gather_object(self, value: Any, **_: Any) -> list[Any]:
        """Ours, and what it says."""
        return [value, self.said]


VIEW = View("a" * 32, 2, tuple(ProcessId(NodeId(letter * 32), 1) for letter in "ab"))


def hear(said: Any) -> Settlement:
    """Settle with a member that says this."""
    with Other(SimulatedBackend.create_group(1)[0]) as group:
        group.said = said
        return settle(group, VIEW, STANDING, 96)


def written(*fields: Any) -> bytes:
    """Fields of a report, as they travel."""
    return msgspec.msgpack.encode(list(fields))


def fields() -> list[Any]:
    """Those of a good one."""
    found: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(STANDING.message()))
    return found


@pytest.mark.parametrize("value", [None, (), b"", b"\xc1", b"\x93\x01\x02\x03", {"a": 1}])
def test_a_report_that_makes_no_sense_is_refused(value: Any) -> None:
    """Whatever another member sends, it is understood or refused, and its sender named."""
    with pytest.raises(MalformedFrame, match="Rank 1 sent its report") as refused:
        hear(value)
    assert refused.value.rank == 1


STANDING = Standing(
    Report(
        Position("a" * 32, 2, 9),
        ("a" * 32, 2),
        Position("a" * 32, 2, 10),
        True,
        False,
        (Branch("b" * 32, 3),),
        90,
        (Milestone("b" * 32, 3, 7, 70),),
        100,
    ),
    ((0, 4),),
    5000,
    Condition(),
    waits=True,
    token="abc",  # noqa: S106 - a mark in a folder
)


def test_a_report_survives_the_way() -> None:
    """Position, ancestry, samples and trail, up to the largest numbers."""
    assert hear(written(*fields())).decision.target == STANDING.report.attempt
    largest = "f" * 32, (1 << 62) - 1, (1 << 62) - 1, (1 << 62) - 1
    past = [[largest[:2]] * MAX_BRANCHES, largest[1], [largest] * MAX_BRANCHES, largest[1]]
    assert hear(written(*fields()[:5], *past, *fields()[9:])).tokens == ("abc", "abc")


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        (0, ("a" * 33, 1, 1)),
        (0, ("a", -1, 1)),
        (0, ("a", 1, 1.5)),
        (1, ("a" * 33, 1)),
        (2, ("a", 1, 1 << 62)),
        (3, 1),
        (4, None),
        (5, (("a" * 33, 1),)),
        (5, (("a", -1),)),
        (5, ((b"a", 1),)),
        (5, (("a", 1, 1),)),
        (5, (("a", 1),) * (MAX_BRANCHES + 1)),
        (6, -1),
        (6, 1 << 62),
        (6, 1.0),
        (6, "1"),
        (6, True),
        (7, (("a", 1, 1),) * (MAX_BRANCHES + 1)),
        (7, (("a" * 33, 1, 1, 1),)),
        (7, (("a", 1, 1, 1 << 62),)),
        (8, None),
    ],
    ids=str,
)
def test_a_field_that_is_out_of_bounds_is_refused(field: int, wrong: Any) -> None:
    """At most 32 branches, 32 characters, and numbers from 0 to 2^62 - 1."""
    good = fields()
    with pytest.raises(MalformedFrame, match="Rank 1 sent its report"):
        hear(written(*good[:field], wrong, *good[field + 1 :]))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        (9, "x"),
        (9, ((1, 2),)),
        (9, ((("b" * 32, 1), "x" * 300),)),
        (10, 1),
        (0, ("a" * 32, 3, 9)),  # a view that is yet to come
        (11, 7),
        (11, ((0, float("inf")),)),
        (11, ((5, 2),)),
        (11, ((0, 4), (2, 6))),
        (11, ((0, 97),)),  # of 96 samples
        (11, ((0, 1),) * 9),
        (12, "x"),
        (12, -1),
        (13, ()),
        (13, {"load": 900}),
        (14, 1),
        (15, "../a"),
        (15, "a/b"),
        (15, "a\n"),
        (15, "a" * 65),
        (15, "."),
    ],
    ids=str,
)
def test_what_stands_beside_the_report_is_checked_too(field: int, wrong: Any) -> None:
    """Samples in hand, speed, condition, and the mark, which becomes the name of a file."""
    good = fields()
    with pytest.raises(MalformedFrame, match="Rank 1 sent its report"):
        hear(written(*good[:field], wrong, *good[field + 1 :]))


def test_who_has_been_there_from_the_beginning() -> None:
    """In the first view of this lineage, and of all its ancestors."""
    parent, child = "a" * 32, "b" * 32
    with clusters(1) as (node,):
        assert node.view is not None
        ground = Ground(node)
        assert ground.has_founded(node.view)
        assert not ground.has_founded(View(parent, 3, ()))
        assert ground.has_founded(View(parent, 1, ()))
        assert ground.has_founded(View(parent, 4, ()))
        assert not ground.has_founded(View(child, 1, (), (Branch("c" * 32, 2),)))
        assert ground.has_founded(View(child, 1, (), (Branch(parent, 4),)))


def test_records_survive_the_way_and_odd_ones_are_refused() -> None:
    """Weights, speeds and intervals as numbers; more pieces than can be are an error."""
    record = Record(3, 99, 0.1, 5000, 2, ((0, 5), (9, 12)))
    row = record.encode().tolist()
    assert Record.decode(row, 0) == record
    with pytest.raises(MalformedFrame, match=r"Rank 7 sent its part in a step .* 99 intervals"):
        Record.decode([*row[:5], 99, *row[6:]], 7)
    odd = dataclasses.replace(record, signature=5)
    with pytest.raises(MalformedFrame, match="Rank 2 sent its part") as found:
        check_records([record, record, odd], 0)
    assert found.value.rank == 2
    with pytest.raises(CollectiveMismatch, match="Rank 2 brings other gradients"):
        check_records([record, record, odd], 2)  # it must not blame the others
    with pytest.raises(CollectiveMismatch, match="Rank 1 brings other gradients"):
        check_records([record, odd], 0)  # one against one: neither is right
    with pytest.raises(CollectiveMismatch, match="Rank 1 is at step 4, rank 0 at step 3"):
        check_records([record, dataclasses.replace(record, step=4)])
    with pytest.raises(CollectiveMismatch, match="different epochs"):
        check_records([record, dataclasses.replace(record, epoch=1)])


def test_what_two_have_taken_counts_for_one() -> None:
    """One was away while its samples were handed out anew; both stand where all stand."""
    actions = Action.KEEP, Action.KEEP, Action.APPLY, Action.RECEIVE, Action.RECEIVE
    taken = ((0, 4),), ((3, 6),), ((8, 9),), ((4, 6),), ((6, 8),)
    found = Settlement(Decision(FRESH, actions, ""), actions[0], taken, (), (), ())
    assert found.kept({0, 1, 2, 3}) == [((0, 4),), None, (), ((4, 6),), None]
