"""A parameter server: rank 0 holds the model, the others compute gradients at their own pace.

    torchrun --nproc-per-node 3 examples/parameter_server.py
    python examples/parameter_server.py            # the same in three processes, started by itself

Every worker fetches the parameters, computes a gradient on its own data and pushes it; nobody waits
for anybody else, so a slow machine slows down only itself.  The model is a line through points, so
that everybody can see whether it was learned.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from potluck import RpcAgent, TcpBackend

Vector = npt.NDArray[np.float64]

STEPS = 200
RATE = 0.1
TRUTH = np.array([2.0, -1.0, 0.5])
"""What is to be learned."""


@dataclass
class Gradient:
    """What a worker pushes."""

    worker: int
    values: Vector
    loss: float


class ParameterServer:
    """The model and what becomes of gradients; its methods are called by the workers."""

    def __init__(self) -> None:
        self._parameters = np.zeros_like(TRUTH)
        self._lock = threading.Lock()  # several workers push at once
        self.pushed: dict[int, int] = {}

    def fetch(self) -> Vector:
        """The parameters; a copy, for others change them while this one travels."""
        with self._lock:
            return self._parameters.copy()

    def push(self, gradient: Gradient) -> int:
        """Take a step; returns how many this worker has taken."""
        with self._lock:
            self._parameters -= RATE * gradient.values
            self.pushed[gradient.worker] = self.pushed.get(gradient.worker, 0) + 1
            return self.pushed[gradient.worker]


def work(server: Any, rank: int) -> float:
    """Learn from data of one's own; the last loss."""
    chance = np.random.default_rng(rank)
    loss = float("inf")
    for _ in range(STEPS):
        parameters = server.fetch()
        inputs = chance.normal(size=(16, len(TRUTH)))
        errors = inputs @ parameters - inputs @ TRUTH
        loss = float(np.mean(errors**2))
        server.push(Gradient(rank, 2 * inputs.T @ errors / len(inputs), loss))
    return loss


def main() -> None:
    """One rank of the group that the environment describes."""
    with TcpBackend.from_env() as backend, RpcAgent(backend) as agent:
        if backend.rank == 0:
            server = ParameterServer()
            agent.expose(server.fetch)
            agent.expose(server.push)
            backend.barrier()  # the functions are there
            backend.barrier()  # everybody has learned enough
            print(f"learned {np.round(server.fetch(), 3)} from {sorted(server.pushed.items())}")
        else:
            backend.barrier()
            loss = work(agent.service(0), backend.rank)
            print(f"worker {backend.rank}: the last loss was {loss:.1e}")
            backend.barrier()


def start_all(count: int) -> int:
    """Run every rank as a process of its own, as a launcher would."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = os.environ.get("MASTER_PORT", "29517")
    ranks = [
        subprocess.Popen([sys.executable, __file__], env=os.environ | common | {"RANK": str(rank)})
        for rank in range(count)
    ]
    return max(process.wait() for process in ranks)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(start_all(3))
