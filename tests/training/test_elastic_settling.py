"""What members tell each other, before a step and when a view begins."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from potluck import (
    BackendUnavailable,
    CollectiveMismatch,
    DistributedContext,
    MalformedFrame,
    SimulatedBackend,
)
from potluck.core.steps import FRESH, Action, Decision, Report
from potluck.training.elastic_record import Record, check_records
from potluck.training.elastic_settling import Settlement, Standing, settle
from potluck.training.shares import Condition
from potluck.vocabulary import NodeId, ProcessId, View


def test_a_newcomer_that_finds_nobody_with_the_state_says_so() -> None:
    """It does not begin anew where others may have been training."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        late = View("f" * 32, 7, (ProcessId(NodeId("a" * 32), 1),))
        with pytest.raises(BackendUnavailable, match=r"never had the state.*are gone.*begins anew"):
            settle(alone, late, Standing(Report(), (), 0, Condition()))


@pytest.mark.parametrize("value", [None, (), ((1, 2, 3), (), 0, ()), ((("", 0, 0), "", None), 1)])
def test_a_report_that_makes_no_sense_is_refused(value: Any) -> None:
    """Whatever another member sends, it is understood or refused."""
    with pytest.raises(MalformedFrame):
        Standing.decode(value)


def test_records_survive_the_way_and_odd_ones_are_refused() -> None:
    """Weights, speeds and intervals as numbers; more pieces than can be are an error."""
    record = Record(3, 99, 0.1, 5000, 2, ((0, 5), (9, 12)))
    row = record.encode().tolist()
    assert Record.decode(row) == record
    with pytest.raises(CollectiveMismatch, match="claims 99 intervals"):
        Record.decode([*row[:5], 99, *row[6:]])
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
