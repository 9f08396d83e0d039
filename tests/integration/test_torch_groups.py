"""Messages, groups and rendezvous of the backend of PyTorch, among real processes."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import potluck
import potluck.torch
from potluck.net.addresses import usable_hosts
from support.place import Place
from support.ports import free_port
from support.ranks import Ranks
from support.torch_ranks import environment, torch_group, warnings_seen


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A file through which the ranks find each other."""
    return str(tmp_path / "store")


# -- messages ------------------------------------------------------------------------------------


def exchange_messages(place: Place, store: str) -> list[Any]:
    """Blocking and posted messages, by tag, from anybody, in batches."""
    with torch_group(place, store):
        rank, size = place.rank, place.world_size
        right, left = (rank + 1) % size, (rank - 1) % size
        big, inbox = torch.full((400_000,), float(rank)), torch.empty(400_000)
        sending = dist.isend(big, right, tag=3)
        assert dist.recv(inbox, left, tag=3) == left
        assert sending is not None
        sending.wait()
        first, second = torch.empty(1), torch.empty(1)
        for tag in (1, 2):
            dist.isend(torch.tensor([10.0 * tag + rank]), right, tag=tag)
        dist.recv(second, left, tag=2)
        dist.recv(first, left, tag=1)
        senders, posted = [], None
        if rank == 0:
            for _ in range(size - 1):
                letter = torch.empty(2)
                sender = dist.recv(letter, tag=5)
                assert letter.tolist() == [float(sender)] * 2
                senders.append(sender)
            posted = dist.irecv(torch.empty(1), tag=6)
        else:
            dist.send(torch.full((2,), float(rank)), 0, tag=5)
        dist.barrier()
        if rank == 1:
            dist.send(torch.tensor([7.0]), 0, tag=6)
        if rank == 0:
            assert posted is not None
            posted.wait()
            assert posted.result()[0].item() == 7.0
            assert posted._source_rank() == 1
        batch = torch.empty(3)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, batch, left),
                dist.P2POp(dist.isend, torch.full((3,), float(rank)), right),
            ]
        )
        for work in works:
            work.wait()
        return [inbox[5].item(), first.item(), second.item(), sorted(senders), batch.tolist()]


def test_messages_reach_whom_they_are_for(ranks: Ranks, store: str) -> None:
    """With tags, from whoever sends, and in batches."""
    for rank, result in enumerate(ranks.run(exchange_messages, 3, store)):
        left = (rank - 1) % 3
        senders = [1, 2] if rank == 0 else []
        assert result == [left, 10.0 + left, 20.0 + left, senders, [float(left)] * 3]


def post_and_compute(place: Place, store: str) -> bool:
    """A large message moves although nobody waits for it on either side."""
    with torch_group(place, store):
        done = threading.Event()
        if place.rank == 0:
            work = dist.isend(torch.ones(3_000_000), 1)
        else:
            work = dist.irecv(torch.empty(3_000_000), 0)
        assert work is not None
        work.get_future().then(lambda _: done.set())
        moved = done.wait(20)
        dist.barrier()
        return moved


def test_a_posted_message_moves_by_itself(ranks: Ranks, store: str) -> None:
    """Futures of messages come true while the program does something else."""
    assert ranks.run(post_and_compute, 2, store) == [True, True]


# -- groups --------------------------------------------------------------------------------------


def use_groups(place: Place, store: str) -> list[Any]:
    """Overlapping groups from several threads, one in an order of its own, and names."""
    from torch.distributed.distributed_c10d import _new_group_with_tag

    with torch_group(place, store) as world:
        left, right = dist.new_group([0, 1]), dist.new_group([1, 2], group_desc="the right ones")
        turned = _new_group_with_tag([2, 0, 1], sort_ranks=False)
        mine = [group for group in (left, right, world) if dist.get_rank(group) >= 0]
        sums: dict[int, float] = {}

        def work(index: int, group: Any) -> None:
            for _ in range(5):
                tensor = torch.full((2000,), 1.0 + place.rank)
                dist.all_reduce(tensor, group=group)
                sums[index] = tensor[3].item()

        threads = [
            threading.Thread(target=work, args=(index, group)) for index, group in enumerate(mine)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gathered = [torch.empty(1) for _ in range(3)]
        dist.all_gather(gathered, torch.tensor([float(place.rank)]), group=turned)
        names = [world.group_name, world.group_desc, world.name(), dist.get_backend()]
        if place.rank == 2:
            names.append(right.group_desc)
        if left is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(left)
        dist.barrier()
        return [[sums[key] for key in sorted(sums)], [each.item() for each in gathered], names]


def test_groups_overlap_and_keep_their_order(ranks: Ranks, store: str) -> None:
    """Each is used by a thread of its own at the same time; all have their names."""
    for rank, (sums, gathered, names) in enumerate(ranks.run(use_groups, 3, store)):
        assert sums == [[3.0, 6.0], [3.0, 5.0, 6.0], [5.0, 6.0]][rank]
        assert gathered == [2.0, 0.0, 1.0]
        assert names[1:4] == ["default_pg", "potluck", "potluck"]
        assert names[4:] == (["the right ones"] if rank == 2 else [])


def monitor(place: Place, store: str) -> Any:
    """Two ranks wait at a barrier for a third that does not come, then for all."""
    with torch_group(place, store):
        failure = None
        if place.rank != 1:
            failure = place.failure_of(potluck.torch.monitored_barrier, timeout=0.3)
        dist.barrier()
        group = dist.new_group([0, 1])
        potluck.torch.monitored_barrier(group, timedelta(seconds=20))
        return failure


def test_a_monitored_barrier_names_the_absent(ranks: Ranks, store: str) -> None:
    """On every rank that came."""
    first, second, third = ranks.run(monitor, 3, store)
    assert second is None
    for failure in (first, third):
        assert failure["missing"] == [1]
        assert "rank 1 has not arrived" in failure["text"]


def abort_and_go_on(place: Place, store: str) -> list[str]:
    """A group is aborted in the middle of an operation; others still work."""
    with torch_group(place, store) as world:
        other = dist.new_group()
        kinds = []
        if place.rank == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            world.abort()
            kinds.append(place.failure_of(work.wait)["kind"])
        else:
            kinds.append(place.failure_of(dist.all_reduce, torch.ones(2))["kind"])
        dist.all_reduce(torch.ones(2), group=other)
        return kinds


def test_an_aborted_operation_ends_on_all_ranks(ranks: Ranks, store: str) -> None:
    """With an error that says so."""
    assert ranks.run(abort_and_go_on, 2, store) == [["Aborted"], ["Aborted"]]


# -- rendezvous ----------------------------------------------------------------------------------


def meet_again_and_again(place: Place, store: str, port: int) -> list[Any]:
    """Groups one after the other, by every way in which ranks can find each other."""
    ways: dict[str, Callable[[], Any]] = {}
    where = functools.partial(TCPStore, "127.0.0.1", port + 1, place.world_size)
    ranked: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size}
    environment(place, port)
    ways["env"] = lambda: dist.init_process_group("potluck")
    ways["tcp"] = lambda: dist.init_process_group(
        "potluck", init_method=f"tcp://127.0.0.1:{port + 2}", **ranked
    )
    ways["file"] = lambda: dist.init_process_group(
        "cpu:potluck", init_method=f"file://{store}", **ranked
    )
    shared = where(is_master=place.rank == 0)
    for _ in range(2):  # the second group must not read what the first has left there
        ways[f"store{len(ways)}"] = lambda: dist.init_process_group(
            "potluck", store=shared, **ranked
        )
    sums, warned = [], 0
    for way in ways.values():
        with warnings_seen() as seen:
            way()
        warned += sum("neither authenticated nor encrypted" in text for text in seen)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        dist.destroy_process_group()
    return [sums, warned]


def test_ranks_meet_by_any_store(ranks: Ranks, store: str) -> None:
    """Again and again in one process; rank 0 warns once that PyTorch's own store is open."""
    first, second = ranks.run(meet_again_and_again, 2, store, free_port())
    assert first[0] == second[0] == [2.0] * 5
    assert first[1] <= 1  # the process may have said so before
    assert second[1] == 0


def meet_as_strangers(place: Place, store: str) -> list[Any]:
    """Ranks that take each other for processes of different machines."""
    with (
        mock.patch("potluck.net.tcp._machine", return_value=f"machine {place.rank}"),
        torch_group(place, store) as world,
    ):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert isinstance(world, potluck.torch.ProcessGroup)
        return [tensor.item(), world.context.peer_name(1 - place.rank)]


@pytest.mark.skipif(not usable_hosts(), reason="this machine is on no network")
def test_ranks_of_other_machines_meet_by_addresses_they_can_reach(ranks: Ranks, store: str) -> None:
    """Rank 0 says all of its own, and none of them is loopback."""
    for total, name in ranks.run(meet_as_strangers, 2, store):
        assert total == 2.0
        assert "127.0.0.1" not in name


def meet_by_potluck(place: Place, port: int, job: str) -> list[Any]:
    """Groups whose store is reached by members alone: as launched, and as found by discovery."""
    results = []
    for is_launched in (True, False):
        with mock.patch.dict(os.environ):
            if is_launched:
                environment(place, port)
            else:
                for name in ("RANK", "WORLD_SIZE"):
                    os.environ.pop(name, None)
                os.environ |= {"POTLUCK_JOB": job, "POTLUCK_MIN_NODES": str(place.world_size)}
            with warnings_seen() as seen:
                dist.init_process_group("potluck", init_method="potluck://")
        assert not [text for text in seen if "authenticated" in text]
        results.append(use_the_store())
        dist.destroy_process_group()
    return results


def use_the_store() -> list[Any]:
    """Everything PyTorch asks of a store, on all ranks."""
    rank, tensor = dist.get_rank(), torch.ones(1)
    dist.all_reduce(tensor)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"from {rank}", f"rank {rank}")
    other = store.get(f"from {1 - rank}")
    with pytest.raises(potluck.Timeout, match="nobody"):
        store.wait(["nobody"], timedelta(seconds=0.05))
    store.add("arrived", 1)
    dist.barrier()
    found = [tensor.item(), other.decode(), store.add("arrived", 0), store.check(["nobody"])]
    dist.barrier()
    if rank == 0:
        found += [store.compare_set("c", "", "1").decode(), store.delete_key("c")]
        found.append(store.num_keys() >= 3)
    group = dist.new_group([1, 0])
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    return [*found, tensor.item()]


def test_a_store_that_only_members_reach(ranks: Ranks) -> None:
    """By ``potluck://`` nothing listens in clear, and PyTorch finds all it needs."""
    job = f"torch-{free_port()}"
    first, second = ranks.run(meet_by_potluck, 2, free_port(), job)
    for launched in (first, second):
        for result in launched:
            assert result[0] == 2.0
            assert result[2:4] == [2, False]
            assert result[-1] == 4.0
    assert {each[1] for each in (first[0], second[0])} == {"rank 0", "rank 1"}
    assert first[0][4:7] == ["1", True, True]


def miss_somebody(place: Place, store: str) -> Any:
    """Only rank 0 comes."""
    failure = place.failure_of(
        dist.init_process_group,
        "potluck",
        init_method=f"file://{store}",
        rank=place.rank,
        world_size=2,
        timeout=timedelta(seconds=0.5),
    )
    # PyTorch counts groups that did not come about too, and names the next one by that.
    dist.distributed_c10d._world.group_count = 0
    return failure


def test_ranks_that_do_not_come_are_named(ranks: Ranks, store: str) -> None:
    """The error says who, for how long, and what to look at."""
    failure = ranks.start(miss_somebody, 2, store, ranks=[0])[0].value()
    assert failure["missing"] == [1]
    assert "did not come" in failure["text"]


def mix_backends(place: Place, store: str) -> list[Any]:
    """Gloo for the whole, Potluck for a group; and what is for Potluck alone."""
    with torch_group(place, store, backend="gloo"):
        hook = potluck.torch.compress_hook("int8")
        failures = [
            place.failure_of(hook, None, None)["text"],
            place.failure_of(potluck.torch.monitored_barrier)["text"],
        ]
        ours = dist.new_group(backend="potluck")
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=ours)
        dist.all_reduce(tensor)
        return [tensor.tolist(), *failures]


def test_it_stands_beside_other_backends(ranks: Ranks, store: str) -> None:
    """A group of its own within a world of Gloo; what needs Potluck says so."""
    for sums, hook, barrier in ranks.run(mix_backends, 2, store):
        assert sums == [4.0, 4.0]
        assert "needs a process group of the backend 'potluck', not of 'gloo'" in hook
        assert "for groups of the backend 'potluck'" in barrier
