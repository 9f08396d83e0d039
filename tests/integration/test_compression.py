"""Compressed all-reduces among real processes, over TCP: sealed, plain, and when one is killed."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from potluck import DistributedContext, GradientCompressor, NetworkNamespace, TcpBackend
from potluck.collective.call import Work
from potluck.collective.compressed import CompressedExchange
from potluck.compression.base import Codec, Floats
from potluck.compression.codecs import BFloat16, Int8, OneBit
from potluck.compression.sparse import Sparse
from potluck.errors import DistributedError, MalformedFrame
from support.gradients import normal, relative_error
from support.place import Place, as_failure
from support.ranks import Ranks
from support.threads import PATIENCE

COUNT = 400_000
METHODS = (
    "float16",
    "bfloat16",
    "int8",
    "onebit",
    "topk:0.01",
    "random:0.01",
    "powersgd:2",
    "auto",
)


def gradient(rank: int = 0) -> Floats:
    """Of a rank, as a matrix."""
    return normal(COUNT, rank).reshape(800, 500)


def train(place: Place, is_plain: bool) -> list[tuple[str, float]]:
    """Three steps by each method: what all ranks must have, and how far it is from the truth."""
    namespace = NetworkNamespace.insecure() if is_plain else None
    backend = TcpBackend(place.rank, place.world_size, place.master, namespace=namespace)
    wanted = sum(normal(COUNT, rank).astype(np.float64) for rank in range(place.world_size))
    ends = []
    with DistributedContext(backend) as context:
        for method in METHODS:
            compressor = GradientCompressor(method)
            total = np.zeros((800, 500))
            works = [
                context.all_reduce(gradient(place.rank), compression=compressor, async_op=True)
                for _ in range(3)
            ]
            for work in works:
                total += work.wait(PATIENCE)
            digest = hashlib.sha256(total.tobytes()).hexdigest()
            mean = (total / 3).reshape(-1).astype(np.float32)
            ends.append((digest, relative_error(mean, np.asarray(wanted, np.float32))))
        context.barrier()
    return ends


@pytest.mark.parametrize("is_plain", [False, True], ids=["sealed", "plain"])
def test_all_processes_end_with_the_same_bits(ranks: Ranks, *, is_plain: bool) -> None:
    """Whatever the method; those that keep every value come near to the sum as well."""
    results = ranks.run(train, 3, is_plain)
    for index, method in enumerate(METHODS):
        assert len({result[index][0] for result in results}) == 1, method
        if method in {"float16", "bfloat16", "int8"}:
            assert results[0][index][1] < 0.01, method


def sum_until_the_end(place: Place, method: str) -> Any:
    """Sum again and again; what went wrong."""
    with place.join() as backend, DistributedContext(backend) as context:
        compressor = GradientCompressor(method, auto_commit=False)
        context.all_reduce(gradient(), compression=compressor, timeout=PATIENCE)
        compressor.commit()
        before = compressor.state_dict()["residuals"][""].tobytes()
        place.say("going")
        works: list[Work[Floats]] = []
        failure: Any = None
        while failure is None:
            works = [
                context.all_reduce(gradient(), compression=compressor, async_op=True)
                for _ in range(2)
            ]
            try:
                for work in works:
                    work.wait(PATIENCE)
            except DistributedError as error:
                failure = as_failure(error)
        with pytest.raises(DistributedError):
            works[-1].wait(PATIENCE)  # the one behind it ends as well
        compressor.discard()
        return failure, before == compressor.state_dict()["residuals"][""].tobytes()


@pytest.mark.parametrize("method", ["int8", "topk:0.01", "powersgd:4"])
def test_a_killed_rank_leaves_the_memory_of_the_others_as_it_was(ranks: Ranks, method: str) -> None:
    """The step that failed never was; whoever waits for one of its operations is told."""
    processes = ranks.start(sum_until_the_end, 3, method)
    for process in processes:
        process.expect("going")
    processes[2].kill()
    for process in processes[:2]:
        failure, is_same = process.value()
        assert failure["rank"] == 2
        assert is_same


# -- a rank that lies ------------------------------------------------------------------------------


@contextlib.contextmanager
def spoiling(kind: type, name: str, spoil: Callable[[Any], None]) -> Iterator[None]:
    """Let a method of this process spoil what it is about to send, and believe itself."""
    method, decode, unpack = getattr(kind, name), Codec.decode, Sparse.unpack

    def lie(self: Any, *rest: Any) -> Any:
        if kind is CompressedExchange:
            said, counts = rest[0].copy(), rest[1:]
            spoil(said)
            heard = method(self, said, *counts).reshape(-1, said.size)
            heard[1] = rest[0]
            return heard.reshape(-1)
        made = method(self, *rest)
        spoil(rest[1] if rest else made)
        return made

    def decode_anything(self: Codec, data: Any, out: Any) -> None:
        with contextlib.suppress(MalformedFrame):
            decode(self, data, out)

    def unpack_anything(data: Any, total: int) -> Sparse:
        try:
            return unpack(data, total)
        except MalformedFrame:
            return Sparse(total, np.empty(0, np.int64), np.empty(0, np.float32))

    with (
        mock.patch.object(kind, name, lie),
        mock.patch.object(Codec, "decode", decode_anything),
        mock.patch.object(Sparse, "unpack", unpack_anything),
    ):
        yield


def setting(place: int, number: int, dtype: Any = np.uint8) -> Callable[[Any], None]:
    """Overwrite a number among the bytes that are to be sent."""

    def spoil(array: Any) -> None:
        seen = array[: array.size * array.itemsize // np.dtype(dtype).itemsize].view(np.uint8)
        size = np.dtype(dtype).itemsize
        seen[place * size : (place + 1) * size].view(dtype)[0] = number

    return spoil


INFINITY = 0x7F800000
LIES: dict[str, tuple[str, type, str, Callable[[Any], None]]] = {
    "a scale that is infinite": ("int8", Int8, "_encode_all", setting(0, INFINITY, np.uint32)),
    "a scale below zero": ("onebit", OneBit, "encode", setting(0, 0xBF800000, np.uint32)),
    "more values than there are": ("topk:0.01", Sparse, "pack", setting(0, 1 << 50, np.uint64)),
    "another coding": ("topk:0.01", Sparse, "pack", setting(16, 9)),
    "indices beyond the end": ("topk:0.01", Sparse, "pack", lambda data: data[-400:].fill(254)),
    "a size below zero": ("topk:0.01", CompressedExchange, "gather", setting(0, -5, np.int64)),
    "a step in the far future": (
        "random:0.01",
        CompressedExchange,
        "gather",
        setting(1, 1 << 60, np.int64),
    ),
    "a step before the first": (
        "powersgd:2",
        CompressedExchange,
        "gather",
        setting(1, -1, np.int64),
    ),
    "another tensor": ("powersgd:2", CompressedExchange, "gather", setting(2, 7, np.int64)),
    "a method that is not known": ("auto", CompressedExchange, "gather", setting(0, 77, np.int64)),
}


def suffer(place: Place) -> list[tuple[list[Any], bool]]:
    """Rank 1 lies in every way that there is; what becomes of it, and whether it left traces."""
    found = []
    with place.join() as backend, DistributedContext(backend) as context:
        for method, kind, name, spoil in LIES.values():
            compressor, array = GradientCompressor(method), gradient(place.rank)
            failures: list[Any] = [None, None]
            with contextlib.nullcontext() if place.rank != 1 else spoiling(kind, name, spoil):
                try:
                    context.all_reduce(array, compression=compressor, timeout=PATIENCE)
                except DistributedError as error:
                    failures[0] = as_failure(error)
            try:
                context.barrier(PATIENCE)
            except DistributedError as error:
                failures[1] = as_failure(error)
            context.barrier(PATIENCE)
            found.append((failures, len(compressor.residuals) == compressor.step == 0))
    return found


def test_a_rank_that_lies_is_named_on_all_ranks(ranks: Ranks) -> None:
    """Whatever it sends, the operation ends for everybody, nothing is kept, the group goes on."""
    for rank, found in enumerate(ranks.run(suffer, 3)):
        for lie, (failures, is_clean) in zip(LIES, found, strict=True):
            failure = failures[0]
            if rank == 1 and failure is None:  # it believes itself, and hears of it afterwards
                failure = failures[1]
            else:
                assert is_clean, lie
            assert failure is not None, lie
            assert {"MalformedFrame", "CollectiveMismatch", "Aborted"} & {*failure["kinds"]}, lie
            assert "ank 1 " in failure["text"], (lie, failure["text"])


def test_numbers_that_are_none_are_not_lies(ranks: Ranks) -> None:
    """Any 16 bits are a bfloat16, and NaN in a sum is nothing new: it reaches all."""
    for isnan in ranks.run(send_nan, 2):
        assert isnan


def send_nan(place: Place) -> bool:
    """One rank's codec writes NaN."""
    with place.join() as backend, DistributedContext(backend) as context:
        spoil = spoiling(BFloat16, "encode", setting(0, 0x7FC0, np.uint16))
        with spoil if place.rank == 1 else contextlib.nullcontext():
            array = context.all_reduce(normal(2000), compression="bfloat16", timeout=PATIENCE)
        context.barrier(PATIENCE)
        return bool(np.isnan(array).any())
