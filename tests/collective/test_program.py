"""Quantised all-reduce: the same bits on all ranks, nothing lost that is not written down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import Aborted, CollectiveMismatch, MalformedFrame
from potluck._types import LinkMatrix
from potluck.backend import simulated
from potluck.collective import executor
from potluck.collective.call import Call, Purpose
from potluck.collective.group import Group
from potluck.collective.program import (
    KEPT,
    PLANS_KEPT,
    STAGED,
    Arrival,
    CallMemory,
    CompiledProgram,
    PlanCache,
    Slot,
    SlotPool,
    UnitKind,
    compile_program,
    confirmation,
    needs_confirming,
)
from potluck.compression.base import ByteArray, Floats
from potluck.compression.codecs import Int8
from potluck.compression.strategy import QuantizationType
from potluck.schedule import planner
from potluck.schedule.planner import CollectiveConfig
from potluck.schedule.reduce import BFLOAT16, ReduceOp, Reducer
from potluck.schedule.schedule import Draft, Form, Operand, Program, ScheduleStep
from potluck.schedule.task import (
    AlgorithmSettings,
    AllReduceStrategy,
    BroadcastStrategy,
    Collective,
    Levels,
    ReduceStrategy,
    Span,
    Task,
)
from support.collectives import OFFERS, layouts, task
from support.gradients import normal, relative_error
from support.groups import LIMIT, Array, in_world, sum_call

kinds = pytest.mark.parametrize("kind", list(QuantizationType), ids=lambda kind: kind.value)
ALLOWED = {"float16": 5e-4, "bfloat16": 5e-3, "int8": 1e-2, "onebit": 0.8}


def reduced(
    data: list[Floats], kind: QuantizationType, op: ReduceOp = ReduceOp.SUM
) -> list[tuple[Floats, Floats]]:
    """What each rank ends with, and what it leaves behind."""

    def action(group: Group) -> tuple[Floats, Floats]:
        array = data[group.rank].copy()
        left = np.full(array.size, 113, np.float32)
        call = replace(sum_call(array, len(data)), reducer=Reducer.of(op, np.float32))
        group.run(replace(call, codec=kind, residual=left), LIMIT)
        return array, left

    outcomes = in_world(len(data), action)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value] # no error is among them


@kinds
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 1000, 300_001])
def test_all_ranks_end_with_the_same_bits(kind: QuantizationType, size: int, count: int) -> None:
    """Short operations and long ones, in pieces."""
    data = [normal(count, seed) for seed in range(size)]
    ends = reduced(data, kind)
    assert len({array.tobytes() for array, _ in ends}) == 1
    if count >= 1000:
        assert relative_error(ends[0][0], np.stack(data).sum(axis=0)) <= ALLOWED[kind.value]


@kinds
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_what_is_left_behind_is_what_is_missing(kind: QuantizationType, op: ReduceOp) -> None:
    """Contributions and results: added to the next gradients, nothing is lost for good."""
    data = [normal(70_000, seed) for seed in range(3)]
    ends = reduced(data, kind, op)
    factor = 3 if op is ReduceOp.MEAN else 1
    found = factor * ends[0][0].astype(np.float64) + sum(left for _, left in ends)
    np.testing.assert_allclose(found, np.sum(data, axis=0, dtype=np.float64), atol=2e-5)


@settings(max_examples=15)
@given(
    kind=st.sampled_from(QuantizationType),
    size=st.integers(2, 4),
    count=st.integers(0, 3000),
    scale=st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e30]),
)
def test_any_magnitude_on_any_number_of_ranks(
    kind: QuantizationType, size: int, count: int, scale: float
) -> None:
    """Zeros, denormals, large ones: finite and the same everywhere."""
    data = [normal(count, seed) * np.float32(scale) for seed in range(size)]
    ends = reduced(data, kind)
    assert len({array.tobytes() for array, _ in ends}) == 1
    assert np.isfinite(ends[0][0]).all()
    assert all(np.isfinite(left).all() for _, left in ends)


@kinds
def test_what_is_no_number_reaches_all_ranks(kind: QuantizationType) -> None:
    """One rank's NaN is not hidden, and stays in nobody's memory."""
    data = [normal(5000, seed) for seed in range(3)]
    data[1][4321] = np.nan
    for array, left in reduced(data, kind):
        assert not np.isfinite(array[4321])
        assert np.isfinite(array[:1000]).all()
        assert np.isfinite(left).all()


@kinds
@pytest.mark.parametrize("is_short", [False, True], ids=["pumped", "straight"])
@pytest.mark.parametrize("size", [2, 4])
def test_nothing_is_mixed_up_in_narrow_streams(
    kind: QuantizationType, size: int, monkeypatch: pytest.MonkeyPatch, *, is_short: bool
) -> None:
    """What waits for its stream is not overwritten by what waits behind it."""
    monkeypatch.setattr(simulated, "STREAM_CAPACITY", 96)
    monkeypatch.setattr(executor, "SHORT", 1 << 40 if is_short else -1)
    monkeypatch.setattr(planner, "piece_for", lambda *_, **__: 200)
    data = [normal(2500, seed) for seed in range(size)]
    ends = reduced(data, kind)
    assert len({array.tobytes() for array, _ in ends}) == 1
    found = ends[0][0].astype(np.float64) + sum(left for _, left in ends)
    np.testing.assert_allclose(found, np.sum(data, axis=0, dtype=np.float64), atol=2e-5)


def test_ranks_that_disagree_about_the_format_are_told() -> None:
    """The format is part of what they compare."""

    def action(group: Group) -> None:
        kind = QuantizationType.INT8 if group.rank else QuantizationType.BF16
        group.run(replace(sum_call(normal(1000), 2), codec=kind), LIMIT)

    outcomes = in_world(2, action)
    assert all(isinstance(outcome, CollectiveMismatch) for outcome in outcomes)
    assert "as int8" in str(outcomes[0])
    assert "as bfloat16" in str(outcomes[0])


class Liar(Int8):
    """Writes a scale that no encoder writes."""

    def encode(self, values: Floats, out: ByteArray) -> None:
        """As usual, but for the first scale."""
        super().encode(values, out)
        out[:4].view(np.float32)[0] = -1.0


def test_a_piece_that_cannot_be_decoded_ends_it_on_all_ranks() -> None:
    """With the name of the rank that sent it; the group works again afterwards."""

    def action(group: Group) -> tuple[str, float]:
        call = replace(sum_call(normal(50_000), 3), codec=QuantizationType.INT8)
        if group.rank == 2:
            group._plans._codecs[QuantizationType.INT8] = Liar()
        with pytest.raises((MalformedFrame, Aborted)) as caught:
            group.run(call, LIMIT)
        group._plans._codecs.clear()
        array = np.ones(10, np.float32)
        group.run(Call(sum_call(array, 3).task, array, array, call.reducer), LIMIT)
        return str(caught.value), float(array[0])

    outcomes = in_world(3, action)
    texts = []
    for outcome in outcomes:
        assert isinstance(outcome, tuple), outcome
        texts.append(outcome[0])
        assert outcome[1] == 3.0
    # A receiver finds it, or rank 2 itself, which also decodes what it made: whichever is first.
    assert all("Rank 2" in text and "cannot be decoded" in text for text in texts[:2]), texts


# --------------------------------------------------------------------------------------------------
# The memory of an operation: spans as bytes and as elements, folding, and slots used again.

OFFSET = 10
"""Where the coordinates of these tests begin."""


def memory_of(
    source: Array, target: Array, step: ScheduleStep, op: ReduceOp | None
) -> tuple[CallMemory, SlotPool]:
    """Memory of two ranks' task that consists of one step."""
    span = Span(OFFSET, OFFSET + source.size)
    units = compile_program(Program(0, span, span, (step,)), source.size)
    pool = SlotPool()
    pool.fit(1024)
    reducer = None if op is None else Reducer.of(op, source.dtype)
    task = Task.whole(Collective.ALL_REDUCE, 2, source.size)
    return CallMemory(units, Call(task, source, target, reducer), pool), pool


def staged(pool: SlotPool, values: Array) -> Slot:
    """A slot with values in it."""
    slot = pool.take()
    slot.view(values.dtype, values.size)[:] = values
    return slot


def step_of(**changes: object) -> ScheduleStep:
    """A step that adds what comes from rank 1 to our own."""
    step = ScheduleStep(
        OFFSET, OFFSET + 3, (1,), (Form.DATA,), Operand.INPUT, 0, Operand.OUTPUT, final=True
    )
    return step._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["f4", "i2", "f8", BFLOAT16], ids=str)
def test_spans_are_found_by_coordinate(dtype: str) -> None:
    """As elements and as the bytes of the same memory."""
    array = np.arange(3).astype(dtype)
    memory, _ = memory_of(array, array, step_of(), ReduceOp.SUM)
    assert memory.cells(Operand.INPUT, OFFSET + 1, OFFSET + 3).tolist() == [1, 2]
    raw = memory.raw(Operand.OUTPUT, OFFSET + 1, OFFSET + 2)
    assert bytes(raw) == array[1:2].tobytes()
    raw[:] = array[2:3].tobytes()
    assert array.tolist() == [0, 2, 2]


@pytest.mark.parametrize("own_at", [0, 1])
@pytest.mark.parametrize(
    ("op", "wanted"), [(ReduceOp.SUM, [5, 7, 9]), (ReduceOp.MEAN, [2.5, 3.5, 4.5])]
)
def test_two_become_one_in_place(op: ReduceOp, wanted: list[float], own_at: int) -> None:
    """What came and what is here; a mean is divided at the end."""
    array = np.array([1, 2, 3], "f4")
    memory, pool = memory_of(array, array, step_of(own_at=own_at), op)
    unit = compile_program(Program(0, Span(10, 13), Span(10, 13), (step_of(own_at=own_at),)), 3)
    slot = staged(pool, np.array([4, 5, 6], "f4"))
    assert memory.fold(unit.units[0], [slot]) is None
    assert array.tolist() == wanted
    assert pool.take() is not slot  # it is still the caller's


def test_narrow_numbers_are_summed_wide() -> None:
    """Rounded once, at the end: 2048 + 1 + 1 is 2050, although 2048 + 1 is 2048 in 16 bits."""
    array = np.array([2048], "f2")
    step = step_of(stop=OFFSET + 1, sources=(1, 2), takes=(Form.DATA, Form.DATA))
    memory, pool = memory_of(array, array, step, ReduceOp.SUM)
    one = np.array([1], "f2")
    unit = compile_program(Program(0, Span(10, 11), Span(10, 11), (step,)), 1).units[0]
    memory.fold(unit, [staged(pool, one), staged(pool, one)])
    assert array.tolist() == [2050]


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_a_relay_is_held_and_not_stored(dtype: str) -> None:
    """Its value travels from the slot, wide if that is how partial sums travel."""
    array = np.array([1, 2, 3], dtype)
    step = step_of(into=None, to=(2,), gives=Form.PARTIAL, final=False)
    memory, pool = memory_of(array, array, step, ReduceOp.SUM)
    unit = compile_program(Program(0, Span(10, 13), Span(10, 13), (step,)), 3).units[0]
    held = memory.fold(unit, [staged(pool, np.array([4, 5, 6], dtype))])
    assert held is not None
    assert np.frombuffer(memory.value(unit, held), "f4").tolist() == [5, 7, 9]
    assert array.tolist() == [1, 2, 3]


def test_what_is_already_there_is_not_copied() -> None:
    """Own memory onto itself; and to another place, if that is another."""
    array, other = np.array([1, 2, 3]), np.zeros(3, "i8")
    step = ScheduleStep(OFFSET, OFFSET + 3, own=Operand.INPUT, into=Operand.OUTPUT)
    unit = compile_program(Program(0, Span(10, 13), Span(10, 13), (step,)), 3).units[0]
    for target in (array, other):
        memory, _ = memory_of(array, target, step, None)
        memory.fold(unit, [])
        assert target.tolist() == [1, 2, 3]
        assert bytes(memory.value(unit, None)) == array.tobytes()


def test_slots_are_used_again_but_not_hoarded() -> None:
    """Up to a few megabytes; slots of another size are dropped."""
    pool = SlotPool()
    pool.fit(1 << 20)
    slots = [pool.take() for _ in range(10)]
    for slot in slots:
        pool.give_back(slot)
    again = [pool.take() for _ in range(10)]
    assert len(set(map(id, slots)) & set(map(id, again))) == KEPT >> 20
    pool.fit(1 << 18)  # a little smaller: what is there will do
    assert pool.take().size == 1 << 20
    pool.fit(100)
    pool.give_back(again[0])
    assert pool.take().size == 100


# --------------------------------------------------------------------------------------------------
# Plans of a group: made alike by all ranks, kept, and changed when the links do.

FAST, SLOW = 125_000_000, 25_000_000


def links(*rates: int) -> LinkMatrix:
    """Links with these rates, both ways."""
    return LinkMatrix(rates, rates, LinkMatrix.uniform(len(rates), rate=1, latency=9).latency)


def large(size: int = 4) -> Call:
    """A sum of 16 MiB."""
    return sum_call(np.empty(4 << 20, "f4"), size)


def test_all_ranks_make_the_same_plan() -> None:
    """From the same links, so that their programs fit together."""
    plans = [PlanCache(rank, 4, None) for rank in range(4)]
    for each in plans:
        each.learn(links(FAST, FAST, FAST, SLOW), large(), 0)
    made = [each.compiled(large()) for each in plans]
    assert {(one.plan, one.packed) for one in made} == {(made[0].plan, made[0].packed)}
    assert made[0].plan.algorithm == "direct"
    assert made[0].plan.shares == (1, 1, 1, 0)
    assert made[0].nbytes == 16 << 20
    assert made[3].sent < made[0].sent


def test_what_was_compiled_is_kept() -> None:
    """For calls that look the same; the oldest are dropped in time."""
    plans = PlanCache(0, 2, None)
    first = plans.compiled(sum_call(np.zeros(3), 2))
    assert plans.compiled(sum_call(np.ones(3), 2)) is first
    assert plans.compiled(sum_call(np.zeros(3, "f4"), 2)) is not first
    for count in range(PLANS_KEPT):
        plans.compiled(sum_call(np.zeros(count + 10), 2))
    assert plans.compiled(sum_call(np.zeros(3), 2)) is not first


def test_a_call_is_not_taken_for_one_that_is_gone() -> None:
    """Though its parts may stand where those of an earlier one stood in memory."""
    plans = PlanCache(0, 2, None)
    for count in range(1, 3 * PLANS_KEPT):
        made = plans.compiled(sum_call(np.zeros(count), 2))
        assert made.nbytes == 8 * count
        assert made.fingerprint.elements == count


def test_what_is_part_of_another_call_has_a_fingerprint_of_its_own() -> None:
    """Though it is done in the same way."""
    plans, array = PlanCache(0, 2, None), np.zeros(3)
    task = Task.whole(Collective.BROADCAST, 2, 3)
    own = plans.compiled(Call(task, array, array))
    part = plans.compiled(Call(task, array, array, purpose=Purpose.BROADCAST_TREE))
    assert own.plan == part.plan
    assert own.packed != part.packed


@pytest.mark.parametrize("size", [2, 5, 9, 33])
@pytest.mark.parametrize(
    ("collective", "purpose"),
    [
        (Collective.BROADCAST, Purpose.BROADCAST_OBJECT),
        (Collective.ALL_GATHER, Purpose.ALL_GATHER_OBJECT),
        (Collective.ALL_GATHER, Purpose.TOP_K),
        (Collective.ALL_GATHER, Purpose.AUTO_COMPRESSION),
        (Collective.ALL_GATHER, Purpose.RECORDS),
    ],
)
def test_what_a_rank_is_blamed_for_comes_straight_from_it(
    size: int, collective: Collective, purpose: Purpose
) -> None:
    """Whatever the configuration prefers: no rank passes on what another one said."""
    counts = [1000] * size
    is_gathering = collective is Collective.ALL_GATHER
    task = Task.blocks(collective, counts) if is_gathering else Task.whole(collective, size, 1000)
    array = np.zeros(task.total, np.uint8)
    config = CollectiveConfig(local_broadcast=BroadcastStrategy.TREE)
    for rank in range(size):
        call = Call(task, array[:1000], array, purpose=purpose)
        plan = PlanCache(rank, size, config).plan(call)
        program = planner.schedule(plan.algorithm, task, plan.layout(1)).program(rank)
        for step in program.steps:
            owner = step.start // 1000 if is_gathering else 0
            assert step.sources in {(), (owner,)}
            assert not (step.sources and step.to)


def test_a_plan_changes_only_for_a_real_gain() -> None:
    """And not before it has been in use for a while."""
    plans = PlanCache(0, 4, None)
    plans.learn(links(FAST, FAST, FAST, FAST), large(), 0)
    plans.learn(links(FAST, FAST, FAST, FAST * 9 // 10), large(), 1000)
    assert set(plans.links.up) == {FAST}
    plans.learn(links(FAST, FAST, FAST, SLOW), large(), 10)
    assert set(plans.links.up) == {FAST}
    plans.learn(links(FAST, FAST, FAST, SLOW), large(), 1000)
    assert plans.links.up[3] == SLOW
    plans.forget()
    assert set(plans.links.up) == {0}
    assert not plans.is_surveyed


def test_the_call_decides_before_the_configuration() -> None:
    """And the configuration before the planner."""
    config = CollectiveConfig(
        local_all_reduce=AllReduceStrategy.RING,
        local_reduce=ReduceStrategy.tree(3),
        local_broadcast=BroadcastStrategy.CENTRALIZED,
        num_devices=4,
    )
    plans = PlanCache(0, 4, config)
    assert plans.plan(large()).algorithm == "ring"
    assert plans.plan(sum_call(np.zeros(9), 4, "tree")).algorithm == "tree"
    array = np.zeros(9)
    reduce = Call(Task.whole(Collective.REDUCE, 4, 9), array, array, large().reducer)
    assert (plans.plan(reduce).algorithm, plans.plan(reduce).arity) == ("tree", 3)
    broadcast = Call(Task.whole(Collective.BROADCAST, 4, 9), array, array)
    assert plans.plan(broadcast).algorithm == "central"
    gather = Call(Task.blocks(Collective.ALL_GATHER, (9,) * 4), array, np.zeros(36))
    assert plans.plan(gather).algorithm in {"direct", "doubling", "ring"}


def test_local_and_global_strategies_hold_within_machines_and_among_them() -> None:
    """As they are written down, or as the ranks have found; with one level the other has no say."""
    config = CollectiveConfig(
        num_nodes=2,
        num_devices=2,
        local_all_reduce=AllReduceStrategy.RING,
        global_all_reduce=AllReduceStrategy.tree(3),
    )
    told = PlanCache(0, 4, config).plan(large())
    assert told.levels == Levels((0, 0, 2, 2), "ring", "tree", arity=3)
    found = PlanCache(0, 4, replace(config, num_nodes=None, num_devices=1))
    for machines, strategy in (
        ((0, 1, 0, 0), "ring/tree:3"),
        ((0, 0, 0, 0), "ring"),
        ((0, 1, 2, 3), "tree:3"),
    ):
        found.forget()
        found.learn(replace(links(FAST, FAST, FAST, FAST), machines=machines), large(), 0)
        assert str(found.plan(large()).strategy) == strategy


def test_a_plan_of_two_levels_is_another_on_other_machines() -> None:
    """Ranks that believe in different machines find out before they exchange a byte."""
    plans = [PlanCache(0, 4, CollectiveConfig(two_levels=True)) for _ in range(2)]
    for cache, machines in zip(plans, [(0, 0, 2, 2), (0, 1, 0, 1)], strict=True):
        cache.learn(replace(links(FAST, FAST, FAST, FAST), machines=machines), large(), 0)
    call = replace(large(), strategy=AllReduceStrategy.named("direct/ring"))
    one, other = (cache.plan(call).identity for cache in plans)
    assert one != other
    assert one == plans[0].plan(call).identity


@pytest.mark.parametrize("collective", Collective)
def test_who_might_return_early_is_confirmed(collective: Collective) -> None:
    """Those with a root, and those that move nothing: all others hear from everybody anyway."""
    blocks = collective.has_blocks
    task = Task.blocks(collective, (1, 1)) if blocks else None
    if collective is Collective.ALL_TO_ALL:
        task = Task.exchange([[1, 1], [1, 1]])
    task = task or Task.whole(collective, 2, 1)
    assert needs_confirming(task) is collective.has_root
    assert needs_confirming(Task.whole(Collective.ALL_REDUCE, 2, 0))
    assert not needs_confirming(Task.whole(Collective.BROADCAST, 1, 1))


def test_a_confirmation_hears_of_everybody() -> None:
    """In as many exchanges as a barrier needs."""
    units = confirmation(0, 8)
    assert sorted(units.incoming) == [4, 6, 7]
    assert sorted(units.outgoing) == [1, 2, 4]


# --------------------------------------------------------------------------------------------------
# Units: programs cut into pieces, with everything they wait for.


def test_a_span_is_cut_every_piece() -> None:
    """The last piece is shorter; the streams carry all of them in order."""
    draft = Draft(rank=0, brings=Span(0, 10), gets=Span(0, 10))
    draft.send(Span(0, 10), to=(1,))
    units = compile_program(draft.finish(), piece=4)
    assert [(unit.start, unit.stop) for unit in units.units] == [(0, 4), (4, 8), (8, 10)]
    assert units.outgoing == {1: (0, 1, 2)}
    assert all(unit.kind is UnitKind.SEND for unit in units.units)
    assert units.waits == (0, 0, 0)


def test_what_is_received_waits_for_what_it_overwrites() -> None:
    """Piece by piece: a cell is free once it was handed on."""
    draft = Draft(rank=0, brings=Span(0, 8), gets=Span(0, 8))
    draft.send(Span(0, 8), to=(1,))
    draft.store(Span(0, 8), source=1)
    units = compile_program(draft.finish(), piece=4)
    assert units.on_done == ((2,), (3,), (), ())
    assert units.waits == (0, 0, 1, 1)
    assert [arrival.unit for arrival in units.incoming[1]] == [2, 3]


def test_what_is_combined_waits_for_its_operands() -> None:
    """One arrival for each source; staging is used again after a few pieces."""
    draft = Draft(rank=0, brings=Span(0, 5), gets=Span(0, 5))

    draft.add(ScheduleStep(0, 5, (1, 2), (Form.DATA, Form.DATA), Operand.INPUT, 0, Operand.OUTPUT))
    units = compile_program(draft.finish(), piece=1)
    assert units.waits == (2,) * 5
    for peer in (1, 2):
        rooms = [arrival.after_value for arrival in units.incoming[peer]]
        assert rooms == [-1] * STAGED + list(range(5 - STAGED))


def test_a_relay_holds_its_place_until_it_is_handed_on() -> None:
    """What is not stored stays in its slot until every stream has it."""
    draft = Draft(rank=0, brings=Span(0, 4), gets=Span(0, 0))
    draft.add(ScheduleStep(0, 4, (1,), (Form.DATA,), Operand.INPUT, 0, None, (2,), Form.PARTIAL))
    units = compile_program(draft.finish(), piece=1)
    assert [arrival.after_done for arrival in units.incoming[1]] == [-1, -1, 0, 1]
    assert {arrival.after_value for arrival in units.incoming[1]} == {-1}


def test_memory_is_filled_from_the_front() -> None:
    """Own copies go piece after piece, so that whoever waits for one may rely on those before."""
    draft = Draft(rank=0, brings=Span(0, 3), gets=Span(0, 3), in_place=False)
    draft.keep(Span(0, 3))
    units = compile_program(draft.finish(), piece=1)
    assert units.on_value == ((1,), (2,), ())
    assert units.waits == (0, 1, 1)


class Dry:
    """Lets everything happen that can, as if all streams were endless."""

    def __init__(self, units: CompiledProgram) -> None:
        self._units = units
        self._waits = list(units.waits)
        self._known: set[int] = set()
        self.done: set[int] = set()
        self._arrived = [0] * len(units.units)
        self._handed = [0] * len(units.units)
        self._places = dict.fromkeys(units.incoming, 0)
        self._sent = dict.fromkeys(units.outgoing, 0)

    def run(self) -> int:
        """How many units come to their end."""
        before = -1
        while (now := self._progress()) != before:
            before = now
            self._receive()
            self._compute()
            self._send()
            self._end()
        return len(self.done)

    def _progress(self) -> int:
        counts = [*self._places.values(), *self._sent.values()]
        return sum(counts) + len(self._known) + len(self.done)

    def _has_room(self, arrival: Arrival) -> bool:
        moves = self._units.units[arrival.unit].kind is UnitKind.MOVE
        return (
            (arrival.after_value < 0 or arrival.after_value in self._known)
            and (arrival.after_done < 0 or arrival.after_done in self.done)
            and not (moves and self._waits[arrival.unit])
        )

    def _receive(self) -> None:
        for peer, arrivals in self._units.incoming.items():
            while self._places[peer] < len(arrivals):
                arrival = arrivals[self._places[peer]]
                if not self._has_room(arrival):
                    break
                self._places[peer] += 1
                self._arrived[arrival.unit] += 1
                if self._units.units[arrival.unit].kind is not UnitKind.MOVE:
                    self._waits[arrival.unit] -= 1

    def _compute(self) -> None:
        for index, unit in enumerate(self._units.units):
            has_come = self._arrived[index] == len(unit.step.sources)
            if index not in self._known and not self._waits[index] and has_come:
                self._known.add(index)
                for other in self._units.on_value[index]:
                    self._waits[other] -= 1

    def _send(self) -> None:
        for peer, queue in self._units.outgoing.items():
            while self._sent[peer] < len(queue) and queue[self._sent[peer]] in self._known:
                self._handed[queue[self._sent[peer]]] += 1
                self._sent[peer] += 1

    def _end(self) -> None:
        for index in self._known - self.done:
            if self._handed[index] == len(self._units.units[index].step.to):
                self.done.add(index)
                for other in self._units.on_done[index]:
                    self._waits[other] -= 1


@pytest.mark.parametrize(("algorithm", "collective"), OFFERS)
@given(st.data())
def test_every_program_comes_to_its_end(
    algorithm: str, collective: Collective, data: st.DataObject
) -> None:
    """Whatever the layout: nothing waits for what never happens."""
    size = data.draw(st.integers(1, 6))
    layout: AlgorithmSettings = data.draw(layouts(size))
    work = task(collective, size, data.draw(st.integers(0, 20)), root=size - 1)
    schedule = planner.schedule(algorithm, work, layout)
    for program in schedule.programs:
        units = compile_program(program, layout.piece)
        assert Dry(units).run() == len(units.units)
