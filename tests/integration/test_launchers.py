"""Started by a launcher: every rank finds its place in the environment."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from potluck import TcpBackend
from support.place import Place
from support.ports import free_port
from support.ranks import Ranks
from support.threads import PATIENCE

Environments = list[dict[str, str]]


def join_from_environment(place: Place) -> list[int]:
    """Our rank, the size of the group, and who is before us in it."""
    with TcpBackend.from_env() as backend:
        before, after = (backend.rank - 1) % backend.world_size, (backend.rank + 1)
        send = backend.post_send(bytes([backend.rank]), after % backend.world_size)
        neighbour = bytearray(1)
        backend.recv(neighbour, before, timeout=PATIENCE)
        send.wait(PATIENCE)
        backend.barrier(PATIENCE)
        return [backend.rank, backend.world_size, neighbour[0]]


def run_with(ranks: Ranks, environments: Environments) -> list[list[int]]:
    """One process for each environment; what they found."""
    processes = [ranks.take(environment=environment) for environment in environments]
    for process in processes:
        process.begin(join_from_environment, -1, -1, "")
    return [process.value() for process in processes]


RING_OF_3 = [[0, 3, 2], [1, 3, 0], [2, 3, 1]]
RING_OF_2 = [[0, 2, 1], [1, 2, 0]]


def test_the_variables_of_pytorch_are_understood(ranks: Ranks) -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by hand or by a script."""
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    assert run_with(ranks, [{**common, "RANK": str(rank)} for rank in range(3)]) == RING_OF_3


def test_the_variables_of_open_mpi_are_understood(ranks: Ranks) -> None:
    """When all ranks are on this machine nobody needs to say where rank 0 is."""
    common = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": str(free_port()),
    }
    places = [{**common, "OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(2)]
    assert run_with(ranks, places) == RING_OF_2


def test_the_variables_of_mpich_are_understood(ranks: Ranks) -> None:
    """The same for MPICH and Intel MPI."""
    common = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": str(free_port())}
    assert run_with(ranks, [{**common, "PMI_RANK": str(rank)} for rank in range(2)]) == RING_OF_2


def test_the_variables_of_slurm_are_understood(ranks: Ranks) -> None:
    """The first node of the list has rank 0, and the job's number gives the port."""
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "localhost,desk[3-9]",
        "SLURM_JOB_ID": str(free_port() - 20_000),
    }
    places = [{**common, "SLURM_PROCID": str(rank)} for rank in range(2)]
    assert run_with(ranks, places) == RING_OF_2


def test_a_port_that_something_silent_occupies_is_passed_over(ranks: Ranks) -> None:
    """Beside its store's port torchrun may have left us one where another program listens."""
    port = free_port(count=5)
    common = {
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with contextlib.closing(socket.create_server(("127.0.0.1", port + 1))):
        assert run_with(ranks, [{**common, "RANK": str(rank)} for rank in range(3)]) == RING_OF_3


SCRIPT = """
import json, pathlib, sys
from potluck import TcpBackend

with TcpBackend.from_env() as backend:
    before, after = (backend.rank - 1) % backend.world_size, (backend.rank + 1)
    send = backend.post_send(bytes([backend.rank]), after % backend.world_size)
    neighbour = bytearray(1)
    backend.recv(neighbour, before)
    send.wait()
    backend.barrier()
    found = [backend.rank, backend.world_size, neighbour[0]]
pathlib.Path(sys.argv[1], f"{found[0]}.json").write_text(json.dumps(found))
"""


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program, ended with everything it started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # or torchrun warns at length
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_torchrun_starts_a_group(tmp_path: Path) -> None:
    """The real one: its own store occupies the port it announces, and we take the next."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    port = str(free_port(count=5))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    with running([*torchrun, "--master-port", port, str(script), str(tmp_path)]) as process:
        assert process.wait(50) == 0
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert found == RING_OF_3
