"""Remote calls among real processes: all to all, nested, by the thousand, and with arrays."""

import time

import numpy as np

from potluck import RpcAgent, RpcConfig
from support.place import Place, resident
from support.ranks import Ranks
from support.threads import PATIENCE

GROWTH = 96 << 20  # bytes a rank may grow by, whatever is done to it here


def serve(agent: RpcAgent) -> None:
    """What every rank offers."""
    agent.register("echo", lambda payload: payload)
    agent.register("who", lambda payload: payload + b"%d" % agent.rank)

    @agent.register("around")
    def around(payload: bytes) -> bytes:
        path = payload + b"%d" % agent.rank
        if len(path) > 2 * agent.world_size:
            return path
        return agent.rpc_sync((agent.rank + 1) % agent.world_size, "around", path)

    @agent.expose
    def scale(array: np.ndarray, by: float) -> np.ndarray:
        return array * by


def call_everybody(place: Place) -> list[list[str]]:
    """Each rank calls every rank, itself included; then a call goes round the ranks twice."""
    with place.join() as backend, RpcAgent(backend) as agent:
        serve(agent)
        backend.barrier(PATIENCE)
        answers = [agent.rpc_sync(dst, "who", b"r").decode() for dst in range(place.world_size)]
        path = agent.rpc_sync((place.rank + 1) % place.world_size, "around", b"").decode()
        backend.barrier(PATIENCE)
    return [answers, [path]]


def assert_all_call_all(ranks: Ranks, count: int) -> None:
    """Every rank gets every answer, and the paths are what they should be."""
    found = ranks.run(call_everybody, count)
    for rank, (answers, (path,)) in enumerate(found):
        assert answers == [f"r{dst}" for dst in range(count)]
        expected = [str((rank + 1 + step) % count) for step in range(2 * count + 1)]
        assert path == "".join(expected)


def test_two_processes_call_each_other(ranks: Ranks) -> None:
    """All to all, and nested."""
    assert_all_call_all(ranks, 2)


def test_four_processes_call_each_other(ranks: Ranks) -> None:
    """All to all, and nested."""
    assert_all_call_all(ranks, 4)


def test_eight_processes_call_each_other(ranks: Ranks) -> None:
    """All to all, and nested."""
    assert_all_call_all(ranks, 8)


def call_many(place: Place, count: int) -> list[int]:
    """So many calls at once from rank 0; how many came back right, and how much memory it took."""
    with place.join() as backend, RpcAgent(backend) as agent:
        serve(agent)
        backend.barrier(PATIENCE)
        before = resident()
        right = 0
        if place.rank == 0:
            futures = [agent.rpc_async(1, "echo", b"%d" % number) for number in range(count)]
            right = sum(
                future.wait(PATIENCE) == b"%d" % number for number, future in enumerate(futures)
            )
        backend.barrier(PATIENCE)
        return [right, resident() - before]


def test_ten_thousand_calls_are_in_flight(ranks: Ranks) -> None:
    """On one connection; each gets its own answer, and memory stays bounded."""
    (right, grown), (_, grown_there) = ranks.run(call_many, 2, 10_000)
    assert right == 10_000
    assert grown < GROWTH
    assert grown_there < GROWTH


def move_arrays(place: Place) -> list[float]:
    """Large arrays there and back while small calls pass them and messages go on."""
    with place.join() as backend, RpcAgent(backend) as agent:
        serve(agent)
        backend.barrier(PATIENCE)
        result = []
        if place.rank == 0:
            array = np.arange(8 << 20, dtype=np.float32)
            large = [agent.service(1).scale.later(array, 2.0) for _ in range(3)]
            passed = 0
            while not large[-1].done:
                assert agent.rpc_sync(1, "echo", b"small") == b"small"
                passed += 1
            for future in large:
                np.testing.assert_array_equal(future.wait(PATIENCE), array * 2)
            result = [float(passed)]
        backend.barrier(PATIENCE)
        return result


def test_small_calls_pass_large_arrays(ranks: Ranks) -> None:
    """Several are answered while 32 MiB arrays are under way."""
    (passed,), _ = ranks.run(move_arrays, 2)
    assert passed >= 2


def misbehave(place: Place) -> list[str]:
    """Functions that raise, hang, return too much, or are not there."""
    limits = RpcConfig(max_message=1 << 20, workers=4)
    with place.join() as backend, RpcAgent(backend, limits) as agent:
        serve(agent)
        stopped = []

        @agent.register("hang")
        def hang(payload: bytes) -> bytes:
            call = RpcAgent.current_call()
            assert call is not None
            while not call.cancelled:
                time.sleep(0.001)  # as a long computation that looks up now and then
            stopped.append(place.rank)
            return payload

        agent.register("fail", lambda payload: payload.decode("ascii"))
        agent.register("pour", lambda _: bytes(2 << 20))
        backend.barrier(PATIENCE)
        kinds = []
        for name in ("hang", "fail", "pour", "nobody"):
            for other in place.others:
                failure = place.failure_of(agent.rpc_sync, other, name, b"\xff", 0.3)
                kinds.append(failure["kind"])
        assert agent.rpc_sync(place.others[0], "echo", b"on") == b"on"
        backend.barrier(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while len(stopped) < len(place.others) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(stopped) == len(place.others)
        return kinds


def test_functions_that_misbehave_harm_nobody(ranks: Ranks) -> None:
    """Each is the error it should be, a hanging one learns that nobody waits, and all go on."""
    expected = ["RpcTimeout", "RpcRemoteError", "RpcTooLarge", "RpcFunctionNotFound"]
    for kinds in ranks.run(misbehave, 4):
        assert kinds == [kind for kind in expected for _ in range(3)]


def reduce_and_call(place: Place) -> list[float]:
    """Collectives on one thread, calls on another."""
    from threading import Thread

    from potluck import DistributedContext

    with DistributedContext(place.join()) as context, RpcAgent(context) as agent:
        serve(agent)
        context.barrier()
        wrong: list[int] = []

        def call() -> None:
            for number in range(300):
                other = place.others[number % len(place.others)]
                if agent.rpc_sync(other, "echo", b"%d" % number) != b"%d" % number:
                    wrong.append(number)

        calling = Thread(target=call)
        calling.start()
        total = 0.0
        for step in range(100):
            array = np.full(1000 + step, float(place.rank))
            context.all_reduce(array)
            total += float(array[-1])
        calling.join()
        context.barrier()
        return [total, float(len(wrong))]


def test_calls_and_collectives_do_not_disturb_each_other(ranks: Ranks) -> None:
    """Both are right."""
    assert ranks.run(reduce_and_call, 3) == [[300.0, 0.0]] * 3
