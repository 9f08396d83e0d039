"""A parameter server: rank 0 holds the model, the others compute gradients at their own pace.

    potluck run --per-node 3 examples/parameter_server.py     # three processes on this machine
    potluck run examples/parameter_server.py                  # type this on each machine
    python examples/parameter_server.py                       # starts three processes itself

Each worker fetches the parameters, computes a gradient on its own data and pushes it.  Workers do
not wait for each other, so a slow machine slows down only itself.  The model is a linear function
with known coefficients, so that the result can be checked.
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
"""The coefficients to learn."""


@dataclass
class Gradient:
    """What a worker sends to the server."""

    worker: int
    values: Vector
    loss: float


class ParameterServer:
    """Holds the model and applies gradients; workers call its methods remotely."""

    def __init__(self) -> None:
        self._parameters = np.zeros_like(TRUTH)
        self._lock = threading.Lock()  # several workers push at once
        self.pushed: dict[int, int] = {}

    def fetch(self) -> Vector:
        """A copy of the parameters: other workers change them while this one is sent."""
        with self._lock:
            return self._parameters.copy()

    def push(self, gradient: Gradient) -> int:
        """Apply a gradient; returns how many this worker has pushed."""
        with self._lock:
            self._parameters -= RATE * gradient.values
            self.pushed[gradient.worker] = self.pushed.get(gradient.worker, 0) + 1
            return self.pushed[gradient.worker]


def work(server: Any, rank: int) -> float:
    """Train on this worker's own data; returns the last loss."""
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
    """Run one rank; RANK, WORLD_SIZE and MASTER_ADDR come from the launcher."""
    with TcpBackend.from_env() as backend, RpcAgent(backend) as agent:
        if backend.rank == 0:
            server = ParameterServer()
            agent.expose(server.fetch)
            agent.expose(server.push)
            backend.barrier()  # the functions are registered
            backend.barrier()  # all workers are done
            print(f"learned {np.round(server.fetch(), 3)} from {sorted(server.pushed.items())}")
        else:
            backend.barrier()
            loss = work(agent.service(0), backend.rank)
            print(f"worker {backend.rank}: the last loss was {loss:.1e}")
            backend.barrier()


def start_all(count: int) -> int:
    """Start every rank in its own process, as a launcher would."""
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
