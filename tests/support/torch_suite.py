"""PyTorch's own tests of ``torch.distributed``, run on a backend of choice.

    python -m support.torch_suite gloo|potluck[:mpi] [test ...]

Prints one line of JSON for each test: its name, ``passed``, ``skipped`` or ``failed``, and why.
The suite decides at import which tests suit the backend, by its name; it is imported under the
name ``gloo`` for both, so all that Gloo runs is run here too; with ``:mpi`` under that name, for
what is said to need MPI.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
import types
import unittest
from typing import Any

RANKS = 3
LONGEST = 60  # seconds for one test


def load(backend: str) -> type[unittest.TestCase]:
    """The suite, as a class with all its tests."""
    backend, _, posing_as = backend.partition(":")
    posing_as = posing_as or "gloo"
    os.environ |= {"BACKEND": posing_as, "WORLD_SIZE": str(RANKS), "INIT_METHOD": "env://"}
    _stand_in("expecttest")  # the suite imports it and needs none of it here
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as suite

    common_distributed.TIMEOUT_DEFAULT = LONGEST
    if backend == "potluck":
        _lift(suite, posing_as)
    return _with_processes(suite)


def _stand_in(name: str) -> None:
    if name not in sys.modules:
        module: Any = types.ModuleType(name)
        module.TestCase = unittest.TestCase
        module.assert_expected_inline = lambda *_: None
        sys.modules[name] = module


class _Name(str):
    """The name of our backend, which passes for another's where a test asks whether it is that."""

    __slots__ = ()
    posing_as = "gloo"

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == self.posing_as

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _lift(suite: Any, posing_as: str) -> None:
    """Run on our backend what the suite would run on another."""
    import torch.distributed as dist

    import potluck.torch

    os.environ["BACKEND"] = "potluck"
    os.environ["POTLUCK_NAMESPACE"] = "insecure"
    suite.BACKEND = _Name("potluck")
    _Name.posing_as = posing_as
    suite.PROFILING_SUPPORTED_BACKENDS.append("potluck")
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("potluck")
    ours = potluck.torch.ProcessGroup.monitored_barrier

    def in_their_words(self: Any, *arguments: Any, **options: Any) -> None:
        """The suite looks for sentences of Gloo."""
        try:
            ours(self, *arguments, **options)
        except potluck.DistributedError as error:
            culprit, me = error.rank, self.rank()
            words = "Rank 0 timed out in monitoredBarrier, "
            words += f"Rank {culprit} failed to pass monitoredBarrier"
            if me != 0:
                words = f"Rank {me} successfully reached monitoredBarrier, but received errors "
                words += "while waiting for send/recv from rank 0"
            raise RuntimeError(f"{words}: {error}") from error

    def monitored_barrier(group: Any = None, timeout: Any = None, **options: Any) -> None:
        potluck.torch.monitored_barrier(group, timeout, **options)

    potluck.torch.ProcessGroup.monitored_barrier = in_their_words  # type: ignore[method-assign]
    dist.monitored_barrier = monitored_barrier  # type: ignore[assignment]


def _with_processes(suite: Any) -> type[unittest.TestCase]:
    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            # Forked, not spawned: importing PyTorch anew for every rank would take an hour.
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Suite


def run(suite: type[unittest.TestCase], name: str) -> dict[str, Any]:
    """Run one test."""
    result = unittest.TestResult()
    begun = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        suite(name).run(result)
    problems = result.failures + result.errors
    outcome = "failed" if problems else "skipped" if result.skipped else "passed"
    details = problems or result.skipped
    why = str(details[0][1]) if details else ""
    return {"test": name, "outcome": outcome, "why": why, "took": time.monotonic() - begun}


def main() -> None:
    """Run the tests that were named, or all."""
    backend, *names = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the ranks print is no result
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        os.environ["TEMP_DIR"] = folder
        suite = load(backend)
        for name in names or unittest.TestLoader().getTestCaseNames(suite):
            out.write(json.dumps(run(suite, name)) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
