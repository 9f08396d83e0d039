"""Journals: whatever happened, they fit one message and hold what the journals found."""

from __future__ import annotations

import logging
import math

import msgspec
import pytest

from potluck._types import NodeId, ProcessId, View
from potluck.cluster.events import EventLog, ViewChange
from potluck.cluster.reports import (
    MAX_EPOCHS,
    MAX_EVENTS,
    MAX_NUMBERS,
    EpochLine,
    EventLine,
    Journal,
    StatusRequest,
    bounded,
    read_said,
    write,
)
from potluck.cluster.telemetry import JournalBuilder
from potluck.cluster.views import ViewSessions
from potluck.errors import MalformedFrame
from potluck.membership.events import MembershipChange, MembershipEvent
from potluck.net.frames import MAX_CONTROL
from potluck.wire_messages import pack

ME = ProcessId(NodeId("a" * 32), 7)


def test_the_longest_journal_fits_one_message() -> None:
    """Events wait for the next question; what would fill it alone is left out."""
    long = "€" * 1024
    journal = Journal(
        node=ME.node,
        incarnation=7,
        events=[EventLine(number, 1.0, long) for number in range(MAX_EVENTS)],
        epochs=[EpochLine(number, 1.0, [long[:255]] * 128, long) for number in range(MAX_EPOCHS)],
        latency=[1 << 61] * 128,
        figures={f"{number:03}{'€' * 250}": 1.0 for number in range(MAX_NUMBERS)},
    )
    short = bounded(journal)
    assert len(pack(short)) < MAX_CONTROL
    assert short.latency == journal.latency
    assert (short.epochs, short.figures) == ([], {})
    assert len(short.events) > 10
    assert short.events == journal.events[: len(short.events)]  # the others are asked for next


def test_no_part_of_a_journal_crowds_out_another() -> None:
    """In a large cluster the latest views are told, and events as well."""
    members = [f"{'n' * 32}/1794806698523"] * 128
    epochs = [EpochLine(number, 1.0, members, "without x") for number in range(MAX_EPOCHS)]
    events = [EventLine(number, 1.0, "x" * 300) for number in range(MAX_EVENTS)]
    journal = bounded(Journal(node=ME.node, incarnation=7, epochs=epochs, events=events))
    assert journal.epochs == epochs[-len(journal.epochs) :]
    assert len(journal.epochs) >= 3
    assert journal.events == events


def test_what_is_not_within_bounds_is_refused() -> None:
    """Before anybody looks at it."""
    good = Journal(node=ME.node, incarnation=7)
    assert read_said(write(good)) == good
    for bad in (
        msgspec.structs.replace(good, figures={"x": math.inf}),
        msgspec.structs.replace(good, figures={"x": math.nan}),
        msgspec.structs.replace(good, events=[EventLine(1, math.nan, "x")]),
        msgspec.structs.replace(good, latency=[0] * 129),
        msgspec.structs.replace(good, events=[EventLine(1, 1.0, "x" * 1025)]),
    ):
        with pytest.raises(MalformedFrame):
            read_said(pack(bad))


def test_a_question_of_an_older_program_is_one_without_news() -> None:
    """And an older program reads ours: it looks at no more than it knows."""
    assert read_said(write(StatusRequest())) == StatusRequest(news_after=-1)
    assert msgspec.msgpack.decode(write(StatusRequest())) == {"type": "ask"}


def test_the_scribe_tells_what_came_after() -> None:
    """With the words and the weight of the log; and the views, and figures that are numbers."""
    event_log = EventLog()
    first, second = (View("f" * 32, epoch, (ME,)) for epoch in (1, 2))
    event_log.post(MembershipEvent(MembershipChange.MET, "b is connected"))
    event_log.post(MembershipEvent(MembershipChange.LOST, "b is gone"))
    event_log.changed(ViewChange(first, None, "begun by a"))
    event_log.changed(ViewChange(second, first, "without b"))
    counted = {"collectives.bytes": 5, "broken": math.nan, "endless": math.inf}
    journals = JournalBuilder(ME, event_log, ViewSessions(), lambda: counted)
    journal = journals.journal(0)
    assert [(each.number, each.level, each.text) for each in journal.events] == [
        (1, "info", "b is connected"),
        (2, "warning", "b is gone"),
    ]
    assert [each.number for each in journals.journal(1).events] == [2]
    assert [(each.epoch, each.reason) for each in journal.epochs] == [
        (1, "begun by a"),
        (2, "without b"),
    ]
    assert journal.epochs[0].members == [f"{ME.node}/7"]
    assert journal.figures == {"collectives.bytes": 5.0}
    assert read_said(write(journal)) == journal


def test_events_have_numbers_and_weights() -> None:
    """Those that nobody needs to look at say so."""
    event_log = EventLog()
    event_log.post("first")
    event_log.post("second", quietly=True)
    assert [(each.number, each.level) for each in event_log.events] == [
        (1, logging.INFO),
        (2, logging.DEBUG),
    ]
