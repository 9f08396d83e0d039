"""A member of a training that sends the others something that no correct member sends.

The hooks are in its own process; the others run what everybody runs.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from potluck.collective.failure import FailureMonitor
from potluck.collective.fingerprint import Notices
from potluck.errors import CollectiveMismatch
from potluck.training import elastic, peer_messages, state
from potluck.training.averaging import LENGTH, StepContribution
from potluck.training.elastic import StepAttempt
from potluck.training.state import Chunks, TrainingState
from potluck.training.steps import Position
from support.threads import PATIENCE

KINDS = ("report", "hash", "wishes", "condition", "layout", "record", "chunk")
"""The messages that a training receives from its members."""

MUTATIONS = (
    "other type",
    "nothing",
    "cut off",
    "longer",
    "noise",
    "wrong part",
    "nested",
    "huge",
    "no length",
    "long length",
)
"""What is done to a message that is written down as one value."""

_WRONG: tuple[Any, ...] = (None, "x", -1, 1 << 63, 1.5, b"\xff", [], {}, [[[]]], float("nan"), True)


def corrupted(data: bytes, kind: Any, how: str, seed: int) -> Any:
    """What is sent instead of a message: something that is not a value of its kind."""
    chance = random.Random(seed)
    for _ in range(1000):
        made = _changed(data, how, chance)
        if not isinstance(made, bytes):
            return made
        try:
            msgspec.msgpack.decode(made, type=kind)
        except (msgspec.MsgspecError, ValueError):
            return made
    raise AssertionError(f"{how} makes a message that is valid")


def _changed(data: bytes, how: str, chance: random.Random) -> Any:
    match how:
        case "other type":
            return chance.choice([None, 5, {}, ["a"], "text", 2.5])
        case "nothing":
            return b""
        case "cut off":
            return data[: chance.randrange(len(data))]
        case "longer":
            return data + chance.randbytes(chance.randrange(1, 40))
        case "noise":
            return chance.randbytes(chance.randrange(1, 200))
        case "nested":
            return b"\x91" * 2000 + b"\xc0"
        case "huge":  # claims four thousand million elements
            return b"\xdd\xff\xff\xff\xff" + data
    value = msgspec.msgpack.decode(data)
    return msgspec.msgpack.encode(_replaced(value, chance))


def _replaced(value: Any, chance: random.Random) -> Any:
    """The same value with one part replaced."""
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        return [*value[:place], _replaced(value[place], chance), *value[place + 1 :]]
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        return {**value, key: _replaced(value[key], chance)}
    return chance.choice(_WRONG)


class Saboteur:
    """Corrupts the next message of one kind once ``is_due`` says so."""

    def __init__(self, kind: str, how: str, seed: int, is_due: Callable[[], bool]) -> None:
        self._how, self._seed, self._is_due = how, seed, is_due
        self._what = {
            "report": elastic.WHAT,
            "hash": state.REPLICA,
            "wishes": state.WISHES,
            "layout": state.PLAN,
            "condition": "its condition",
        }.get(kind)
        if kind == "record":
            self._spoil_records()
        elif kind == "call":
            self._spoil_calls()
        elif kind == "chunk":
            self._spoil_chunks()
        elif kind == "state":
            self._spoil_state()
        for module in (elastic, state):
            setattr(module, "gather", self._gather)  # noqa: B010 - mypy knows its type
        setattr(state, "broadcast", self._broadcast)  # noqa: B010

    def _gather(self, group: Any, message: Any, kind: Any, what: str, **options: Any) -> Any:
        if what != self._what or not self._is_due():
            return peer_messages.gather(group, message, kind, what, **options)
        if self._how in {"no length", "long length"}:
            self._announce(group, "all_gather_object")
        else:
            data = msgspec.msgpack.encode(message)
            group.all_gather_object(corrupted(data, kind, self._how, self._seed))
        return rest()

    def _broadcast(
        self, group: Any, message: Any, kind: Any, what: str, root: int, **options: Any
    ) -> Any:
        if message is None or what != self._what or not self._is_due():
            return peer_messages.broadcast(group, message, kind, what, root, **options)
        if self._how in LAYOUTS:
            group.broadcast_object(msgspec.msgpack.encode(LAYOUTS[self._how](message)), root)
        elif self._how in {"no length", "long length"}:
            self._announce(group, "broadcast_object", root)
        else:
            data = msgspec.msgpack.encode(message)
            group.broadcast_object(corrupted(data, kind, self._how, self._seed), root)
        return rest()

    def _announce(self, group: Any, call: str, *arguments: Any) -> None:
        """Announce a length that no message has."""
        from potluck.collective import collectives as objects

        of = objects._PackedObjects.of
        length = -1 if self._how == "no length" else 1 << 40

        def lying(values: Any, limit: int) -> Any:
            parcel = of(values, limit)
            parcel.lengths = [length] * len(parcel.lengths)
            return parcel

        setattr(objects._PackedObjects, "of", lying)  # noqa: B010
        with contextlib.suppress(Exception):
            getattr(group, call)(b"x", *arguments)

    def _spoil_records(self) -> None:
        encode = StepContribution.encode

        def lying(record: StepContribution) -> Any:
            row = encode(record)
            if not self._is_due():
                return row
            return RECORDS[self._how](row)

        setattr(StepContribution, "encode", lying)  # noqa: B010

    def _spoil_calls(self) -> None:
        """Call something else than the others do, when a step begins."""
        if self._how == FALSE_ALARM:
            self._raise_alarms()
            return

        def lying(attempt: StepAttempt, _: float | None) -> Any:
            CALLS[self._how](attempt._group)
            return rest()

        setattr(StepAttempt, "records", lying)  # noqa: B010

    def _raise_alarms(self) -> None:
        """Report in every operation that another rank makes another call, which is not true."""
        begin = FailureMonitor.begin

        def lying(vigil: FailureMonitor, *arguments: Any) -> None:
            begin(vigil, *arguments)
            raise CollectiveMismatch("Ranks disagree about an operation", rank=0)

        setattr(FailureMonitor, "begin", lying)  # noqa: B010
        again = elastic.unclear("once more")
        setattr(elastic.ViewScope, "_judged", lambda *_: again)  # noqa: B010

    def _spoil_chunks(self) -> None:
        read = Chunks.read

        def lying(chunks: Any, number: int) -> bytes:
            data = read(chunks, number)
            if not hasattr(chunks, "digests") or not self._is_due():
                return data  # what it announces is true
            return bytes(len(data))

        setattr(Chunks, "read", lying)  # noqa: B010

    def _spoil_state(self) -> None:
        """Claim to be ahead of all others, with a state that none of them can use, or too far."""
        step = {"other parts": 1 << 30, "the last step": (1 << 62) - 1}[self._how]
        settle = elastic.settle

        def lying(group: Any, view: Any, mine: Any, size: int | None = None) -> Any:
            ahead = Position(view.lineage, view.epoch, step)
            report = replace(mine.report, position=ahead, attended=(view.lineage, view.epoch))
            return settle(group, view, replace(mine, report=report), size)

        setattr(elastic, "settle", lying)  # noqa: B010
        if self._how == "other parts":
            setattr(TrainingState, "capture", lambda _: {"other": np.ones(3)})  # noqa: B010


def rest() -> Any:
    """Do nothing more, and do not leave: the test ends this process."""
    threading.Event().wait(PATIENCE)
    raise AssertionError("This process should have been ended")


def _row(**changes: Any) -> Callable[[Any], Any]:
    places = {"step": 0, "signature": 1, "weight": 2, "speed": 3, "epoch": 4, "pieces": 5}

    def change(row: Any) -> Any:
        row = row.copy()
        for name, value in changes.items():
            if name == "share":
                row[5], row[6:8] = 1, value
            else:
                row[places[name]] = value
        return row

    return change


_NAN = int(np.array(float("nan")).view(np.int64))

RECORDS: dict[str, Callable[[Any], Any]] = {
    "weight of nan": _row(weight=_NAN),
    "negative weight": _row(weight=int(np.array(-1.0).view(np.int64))),
    "intervals": _row(pieces=1 << 40),
    "negative intervals": _row(pieces=-1),
    "backwards": _row(share=(9, 3)),
    "samples beyond the end": _row(share=(0, 1 << 60)),
    "another's samples": _row(share=(0, 96)),
    "another step": _row(step=1 << 50),
    "other gradients": _row(signature=77),
    "another epoch": _row(epoch=9, share=(0, 1)),
    "noise": lambda row: np.random.default_rng(3).integers(-(1 << 63), 1 << 62, LENGTH),
}


def _without_words(group: Any) -> None:
    """Show the others another call, and tell nothing of it."""
    setattr(Notices, "tell", lambda *_: None)  # noqa: B010
    group.barrier()


FALSE_ALARM = "a false alarm"

CALLS: dict[str, Callable[[Any], Any]] = {
    "a barrier": lambda group: group.barrier(),
    "a sum": lambda group: group.all_reduce(np.ones(5, np.float32)),
    "a longer record": lambda group: group.all_gather(np.zeros(LENGTH + 1, np.int64)),
    "another type": lambda group: group.all_gather(np.zeros(LENGTH, np.float64)),
    "without a word": _without_words,
}


def _rows(change: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    def layout(plan: Any) -> Any:
        shape, rows = plan.layout
        return [[shape, change([list(row) for row in rows])], plan.digests]

    return layout


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "an integer as shape": _rows(lambda rows: [[rows[0][0], "float64", 2_000_000_000]]),
    "fifteen gigabytes": _rows(lambda rows: [[rows[0][0], "float64", [2_000_000_000]], *rows[1:]]),
    "elements of a gigabyte": _rows(lambda rows: [[rows[0][0], "(134217728,)f8", [1]], *rows[1:]]),
    "a negative side": _rows(lambda rows: [[rows[0][0], "float64", [-8]], *rows[1:]]),
    "another order": _rows(lambda rows: rows[::-1]),
    "another tree": lambda plan: [[b"\x92\x00\x01", plan.layout.arrays], plan.digests],
    "short hashes": lambda plan: [plan.layout, plan.digests[:-1]],
    "other hashes": lambda plan: [plan.layout, bytes(len(plan.digests))],
}
