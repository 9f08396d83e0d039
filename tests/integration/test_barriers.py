"""Barriers of processes: nobody passes early, nobody is forgotten, leaving hurts nobody."""

import time

from support.place import Failure, Place
from support.ranks import Ranks, new_master
from support.threads import PATIENCE


def pass_one_by_one(place: Place, turns: int) -> list[list[float]]:
    """When this rank came to each barrier and when it went on."""
    moments = []
    with place.join() as backend:
        backend.barrier(PATIENCE)
        for turn in range(turns):
            if turn % place.world_size == place.rank:
                time.sleep(0.02)  # somebody is late, another one each time
            arrived = time.monotonic()
            backend.barrier(PATIENCE)
            moments.append([arrived, time.monotonic()])
    return moments


def test_nobody_passes_before_the_last_has_come(ranks: Ranks) -> None:
    """For every group size, on the clock that all processes of this machine share."""
    for world_size in (2, 3, 4, 8):
        moments = ranks.run(pass_one_by_one, world_size, 8)
        for turn in zip(*moments, strict=True):
            last_arrival = max(arrived for arrived, _ in turn)
            first_departure = min(left for _, left in turn)
            assert last_arrival <= first_departure


def wait_for_the_absent(place: Place, absent: list[int]) -> list[Failure]:
    """The absent come only after everybody else has given up waiting for them, twice."""
    failures = []
    with place.join() as backend:
        backend.barrier(PATIENCE)
        if place.rank in absent:
            place.hear("come")
        else:
            failures = [place.failure_of(backend.barrier, timeout=0.5) for _ in range(2)]
            place.say("gave up")
        backend.barrier(PATIENCE)
        backend.barrier(PATIENCE)
        return failures


def test_a_barrier_that_times_out_names_the_absent_and_can_be_tried_again(ranks: Ranks) -> None:
    """Every rank that waits names all who did not come; when they do, the same barrier passes."""
    absent = [2, 5]
    processes = ranks.start(wait_for_the_absent, 8, absent)
    present = [process for process in processes if process.rank not in absent]
    for process in present:
        process.expect("gave up")
    for rank in absent:
        processes[rank].tell("come")
    for process in processes:
        failures = process.value()
        assert all(failure["kind"] == "Timeout" for failure in failures)
        if failures:  # in the first, on a busy machine, somebody else may have been late as well
            assert failures[1]["missing"] == absent
            assert "ranks 2, 5 have not arrived" in failures[1]["text"]


def meet_and_leave(place: Place, masters: list[str]) -> int:
    """Form a group, pass barriers, leave at once, and again; how often that went well."""
    for place.master in masters:
        with place.join() as backend:
            for _ in range(3):
                backend.barrier(PATIENCE)
    return len(masters)


def test_leaving_right_after_a_barrier_fails_nobody(ranks: Ranks) -> None:
    """Who has passed may be gone before the others know that they have passed too."""
    for world_size in (3, 4):
        masters = [new_master() for _ in range(15)]
        assert ranks.run(meet_and_leave, world_size, masters) == [15] * world_size


def test_a_group_may_form_where_another_is_just_leaving(ranks: Ranks) -> None:
    """Who is quick asks for the next group while rank 0 has not left the one before."""
    assert ranks.run(meet_and_leave, 3, [new_master()] * 5) == [5] * 3


def pass_and_exit(place: Place) -> None:
    """Pass a barrier and end the process, without closing."""
    backend = place.join()
    backend.barrier(PATIENCE)
    place.say("passed")
    raise SystemExit(0)


def test_exiting_right_after_a_barrier_fails_nobody(ranks: Ranks) -> None:
    """The usual end of a script."""
    for _ in range(2):
        processes = ranks.start(pass_and_exit, 4)
        for process in processes:
            process.expect("passed")
        assert [process.exit_code() for process in processes] == [0] * 4


def count_with_messages_under_way(place: Place) -> bool:
    """Barriers and messages of the same pairs at the same time."""
    with place.join() as backend:
        after, before = (place.rank + 1) % place.world_size, (place.rank - 1) % place.world_size
        inbox = bytearray(1 << 20)
        receive = backend.post_recv_into(inbox, before, tag=9)
        for _ in range(20):
            backend.barrier(PATIENCE)
        send = backend.post_send(bytes([place.rank]) * len(inbox), after, tag=9)
        for _ in range(20):
            backend.barrier(PATIENCE)
        send.wait(PATIENCE)
        receive.wait(PATIENCE)
        backend.barrier(PATIENCE)
        return inbox == bytes([before]) * len(inbox)


def test_barriers_and_messages_do_not_take_each_others_place(ranks: Ranks) -> None:
    """A receive that was posted before forty barriers gets its message after them."""
    assert ranks.run(count_with_messages_under_way, 4) == [True] * 4
