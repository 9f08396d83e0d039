"""Programs of PyTorch as ranks in processes of their own."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import potluck
import potluck.torch  # noqa: F401 - registers the backend
from support.place import Place
from support.threads import PATIENCE


@contextlib.contextmanager
def torch_group(place: Place, store: str, **options: Any) -> Iterator[dist.ProcessGroup]:
    """Be a rank of the default process group; ``store`` is a file that all ranks share."""
    torch.set_num_threads(1)  # ranks share few processors
    options.setdefault("timeout", timedelta(seconds=PATIENCE))
    dist.init_process_group(
        options.pop("backend", "potluck"),
        init_method=f"file://{store}",
        rank=place.rank,
        world_size=place.world_size,
        **options,
    )
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        dist.destroy_process_group()


def on_both(
    place: Place, store: str, program: Callable[[], Any], **options: Any
) -> tuple[Any, Any]:
    """What a program returns on Gloo and on our backend, one after the other."""
    results = []
    for backend in ("gloo", "potluck"):
        with torch_group(place, f"{store}.{backend}", backend=backend, **options):
            torch.manual_seed(0)
            results.append(program())
    return results[0], results[1]


def environment(place: Place, port: int) -> None:
    """What torchrun would set."""
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextlib.contextmanager
def warnings_seen() -> Iterator[list[str]]:
    """The warnings of a block."""
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield seen
    seen += [str(each.message) for each in caught]


def in_a_child(action: Callable[[], Any]) -> Any:
    """What an action returns in a forked child; None if that was killed.

    Spares another process the time of importing PyTorch when one of them is to die.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            answer = msgspec.json.encode(action())
            with open(writing, "wb") as pipe:  # noqa: PTH123 - a pipe has no path
                pipe.write(answer)
            code = 0
        except BaseException:  # noqa: BLE001 - the parent's code must not run twice
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    try:
        with open(reading, "rb") as pipe:  # noqa: PTH123
            answer = pipe.read()  # a child that has ended has closed its end
    finally:
        _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return msgspec.json.decode(answer) if answer else None


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """Numbers, computed in another process: here, where that can import it from."""

    def __len__(self) -> int:
        """So many."""
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        """One of them."""
        return torch.tensor([float(index * index)])
