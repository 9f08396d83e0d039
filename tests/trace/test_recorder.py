"""The flight recorder keeps the last operations of a rank, whatever happens to them."""

import functools
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from potluck import DistributedContext, PeerLost, RpcAgent, RpcError, SimulatedBackend, SubBackend
from potluck.collective.group import MessageNote
from potluck.errors import BackendUnavailable
from potluck.trace.recorder import (
    CAPACITY,
    LENGTH_VARIABLE,
    Entry,
    GroupLog,
    Label,
    OperationFailure,
    OperationOutcome,
    Recorder,
    TraceRecord,
    Track,
    log_of,
    make_recorder,
    recorder_of,
)
from support.threads import Background, eventually, together


def entry(number: int, what: str = "step") -> Entry:
    """Something that took a second."""
    return (what, number, number + 1.0, number, 0, 0, Label(Track.TRAINING), None, None)


def test_only_the_last_are_kept() -> None:
    """However many there were, memory is bounded, and what is left is in order."""
    recorder = Recorder(capacity=16)
    assert not recorder.is_full
    for number in range(1, 100):
        recorder.append(entry(number))
    assert [record.number for record in recorder.records(0.0)] == list(range(84, 100))
    assert recorder.is_full


def test_times_are_of_the_steady_clock_and_of_the_wall() -> None:
    """Both, so that a person finds the moment in other logs, and machines can be compared."""
    recorder = Recorder()
    recorder.append(entry(5))
    (record,) = recorder.records(wall=1000.0)
    assert (record.begin, record.end, record.wall) == (5.0, 6.0, 1005.0)


def test_appending_takes_no_more_memory_than_the_ring() -> None:
    """Ten times its capacity leaves as much behind as its capacity: nothing piles up."""
    recorder = Recorder()
    tracemalloc.start()
    try:
        for number in range(CAPACITY):
            recorder.append(entry(number))
        once = tracemalloc.get_traced_memory()[0]
        for number in range(10 * CAPACITY):
            recorder.append(entry(number))
        assert tracemalloc.get_traced_memory()[0] < once * 1.2
    finally:
        tracemalloc.stop()


def test_ranks_of_a_subgroup_are_told_as_ranks_of_the_whole() -> None:
    """Whoever reads several dumps knows one numbering."""
    label = Label(Track.COLLECTIVES, "odd", "", 3, members=(1, 3))
    recorder = Recorder()
    failure = OperationFailure.of(PeerLost("gone", rank=0))
    recorder.append(("barrier", 1.0, 2.0, 1, 0, 0, label, failure, {0: 0.5}))
    (record,) = recorder.records(0.0)
    assert (record.culprit, record.waited, record.outcome) == (1, {1: 0.5}, OperationOutcome.FAILED)


def test_messages_are_numbered_for_each_rank_and_tag() -> None:
    """The n-th send is the n-th receive; one under way is in the dump as such."""
    recorder = Recorder()
    log = GroupLog(recorder, Label(Track.COLLECTIVES, "world", "", 0))
    notes = [MessageNote(log, "send", 1, tag, 8) for tag in (0, 0, 7)]
    notes[1].end(None)
    notes[1].end(ValueError("twice is once"))
    ended, *running = recorder.records(0.0)
    assert (ended.number, ended.outcome, ended.peer) == (2, OperationOutcome.DONE, 1)
    assert [(each.number, each.tag, each.end) for each in running] == [(1, 0, None), (1, 7, None)]


@pytest.fixture
def contexts() -> Iterator[list[DistributedContext]]:
    """Two ranks in one process."""
    made = [DistributedContext(backend) for backend in SimulatedBackend.create_group(2)]
    yield made
    for context in made:
        context.close()


def records_of(context: DistributedContext) -> list[TraceRecord]:
    """What is kept of a rank."""
    return recorder_of(context).records(0.0)


def has_records(context: DistributedContext, count: int) -> bool:
    """Whether so many are kept."""
    return len(records_of(context)) == count


def everywhere(
    contexts: list[DistributedContext], call: Callable[[DistributedContext], object]
) -> None:
    """Make a call on all ranks."""
    together(*(functools.partial(call, each) for each in contexts))


def test_collectives_are_taken_down(contexts: list[DistributedContext]) -> None:
    """Blocking or not, with number, size, group and times, on every rank alike."""
    array = [np.ones(1024, np.float32), np.ones(1024, np.float32)]
    everywhere(contexts, lambda each: each.all_reduce(array[each.rank]))
    everywhere(contexts, lambda each: each.all_reduce(array[each.rank], async_op=True).wait())
    for context in contexts:
        eventually(functools.partial(has_records, context, 2))
        first, second = records_of(context)
        assert [first.number, second.number] == [1, 2]
        assert first.what == second.what == "all_reduce"
        assert (first.bytes, first.group, first.rank) == (4096, "world", context.rank)
        assert first.end is not None
        assert second.end is not None
        assert first.begin <= first.end <= second.begin <= second.end


def test_a_subgroup_has_a_name_of_its_own(contexts: list[DistributedContext]) -> None:
    """Its operations are counted from one, so nobody may take them for those of the whole."""
    subgroups = [context.subgroup([1, 0], name="pair") for context in contexts]
    everywhere(subgroups, lambda each: each.barrier())
    (record,) = records_of(contexts[1])
    assert (record.group, record.members, record.what) == ("pair", (0, 1), "barrier")
    inner = SubBackend(subgroups[0].backend, [0])
    assert log_of(inner).collectives.members == (0,)
    assert log_of(inner).recorder is recorder_of(contexts[0])


def test_messages_and_what_is_under_way_are_taken_down(contexts: list[DistributedContext]) -> None:
    """A receive that waits is seen while it waits, and as done when it is done."""
    left, right = contexts
    receiving = Background(lambda: right.recv(np.empty(4, np.uint8), 0))
    eventually(lambda: len(records_of(right)) == 1)
    assert records_of(right)[0].outcome is OperationOutcome.RUNNING
    left.isend(np.arange(4, dtype=np.uint8), 1).wait()
    receiving.result()
    (received,), (sent,) = records_of(right), records_of(left)
    assert (received.what, received.peer, received.bytes) == ("recv", 0, 4)
    assert (sent.what, sent.peer, sent.outcome) == ("send", 1, OperationOutcome.DONE)


def test_a_collective_under_way_says_for_whom_it_waits(contexts: list[DistributedContext]) -> None:
    """The first thing to know of a program that hangs."""
    left, right = contexts
    waiting = Background(left.barrier)
    eventually(lambda: any(1 in record.waited for record in records_of(left)))
    (record,) = records_of(left)
    assert (record.what, record.outcome, record.number) == ("barrier", OperationOutcome.RUNNING, 1)
    right.barrier()
    waiting.result()
    (record,) = records_of(left)
    assert record.outcome is OperationOutcome.DONE
    assert record.waited[1] > 0


def test_a_failure_is_taken_down_with_its_reason() -> None:
    """With the sentence that the program got, the rank it names, and the epoch it was in."""
    backends = SimulatedBackend.create_group(2)
    contexts = [DistributedContext(each) for each in backends]
    everywhere(contexts, lambda each: each.barrier())
    backends[1].lose()
    with pytest.raises(PeerLost) as caught:
        contexts[0].barrier()
    _, record = records_of(contexts[0])
    assert (record.outcome, record.error, record.culprit) == (
        OperationOutcome.FAILED,
        "PeerLost",
        1,
    )
    assert record.reason == str(caught.value)
    assert (record.number, record.epoch) == (2, 0)
    for context in contexts:
        context.close()


def test_how_many_are_kept_is_the_users_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within reason; anything else is refused with the reason."""
    monkeypatch.setenv(LENGTH_VARIABLE, "64")
    assert make_recorder().capacity == 64
    for wrong in ("8", "many", "9" * 30, "-5"):
        monkeypatch.setenv(LENGTH_VARIABLE, wrong)
        with pytest.raises(BackendUnavailable, match="POTLUCK_TRACE_LENGTH must be a number"):
            make_recorder()


def test_remote_calls_are_taken_down_by_who_makes_them(contexts: list[DistributedContext]) -> None:
    """With the function's name and the rank; one that fails with what the caller got."""
    left, right = contexts
    with RpcAgent(left) as caller, RpcAgent(right) as server:
        server.register("shout", lambda payload: payload.upper())
        caller.rpc_sync(1, "shout", b"dinner")
        with pytest.raises(RpcError):
            caller.rpc_sync(1, "whisper")
    done, failed = records_of(left)
    assert (done.lane, done.what, done.peer, done.outcome) == (
        "calls",
        "shout",
        1,
        OperationOutcome.DONE,
    )
    assert done.bytes > 6
    assert (failed.what, failed.outcome) == ("whisper", OperationOutcome.FAILED)
    assert "whisper" in failed.reason
    assert records_of(right) == []
