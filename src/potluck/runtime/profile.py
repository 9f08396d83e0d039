"""What this machine is: its profile, found out in a few milliseconds and never with an error.

Whatever the operating system does not tell stays unknown.  Accelerators are found without importing
a framework: by what its driver shows, and through torch only where the program has already put it
to use.  Inside a container the limits of the container count, not the machine around it.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from potluck.core.topology_nodes import Accelerator, Battery, NodeProfile

__all__ = ["local_profile"]

Found = TypeVar("Found")

_TEXT = 128  # characters of a text in a profile
_MOST = 16  # accelerators in a profile
_CPU_INFO = 4096  # bytes of /proc/cpuinfo that hold the first processor


def local_profile(*, root: Path = Path("/")) -> NodeProfile:
    """The profile of this machine; ``root`` is where its files are."""
    return NodeProfile(
        host=_clean(_try(socket.gethostname, "")),
        system=_clean(_try(_system, "")),
        machine=_clean(_try(platform.machine, "")),
        processor=_clean(_try(lambda: _processor(root), "")),
        python=_clean(_try(platform.python_version, "")),
        cores=_try(lambda: _cores(root), 0),
        physical_cores=_try(_physical_cores, 0),
        memory=_try(lambda: _memory(root)[0], 0),
        available_memory=_try(lambda: _memory(root)[1], 0),
        accelerators=_try(lambda: _accelerators(root), ()),
        battery=_try(_battery, None),
    )


def _try(look: Callable[[], Found], otherwise: Found) -> Found:
    """What there is to see, or what to assume where there is nothing."""
    try:
        return look()
    except Exception:  # noqa: BLE001 - drivers and their files fail in every way there is
        return otherwise


def _clean(text: str) -> str:
    """Printable and bounded, as a profile wants it."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(printable.split())[:_TEXT]


def _system() -> str:
    return f"{platform.system()} {platform.release()}"


def _processor(root: Path) -> str:
    """What the processor is sold as."""
    info = root / "proc/cpuinfo"
    if info.exists():
        with info.open("rb") as file:
            head = file.read(_CPU_INFO).decode("utf-8", "replace")
        for line in head.splitlines():
            name, _, value = line.partition(":")
            if name.strip() in {"model name", "Model", "Hardware"}:
                return value
    return "Apple silicon" if _is_apple_silicon() else ""


def _is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _cores(root: Path) -> int:
    """Those that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 0
    quota = _try(lambda: _container_cores(root), 0)
    return min(count, quota) if quota else count


def _container_cores(root: Path) -> int:
    """How many cores a container may keep busy; 0 without a limit."""
    quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    return 0 if quota == "max" else math.ceil(int(quota) / int(period))


def _physical_cores() -> int:
    import psutil

    return psutil.cpu_count(logical=False) or 0


def _memory(root: Path) -> tuple[int, int]:
    """Bytes in all, and bytes that are free."""
    import psutil

    state = psutil.virtual_memory()
    limit = _try(lambda: int((root / "sys/fs/cgroup/memory.max").read_text()), state.total)
    return min(state.total, limit), min(state.available, limit)


def _battery() -> Battery | None:
    import psutil

    look: Callable[[], Any] | None = getattr(psutil, "sensors_battery", None)
    state = look() if look else None
    if state is None:
        return None
    return Battery(min(100, max(0, round(state.percent))), plugged=bool(state.power_plugged))


def _accelerators(root: Path) -> tuple[Accelerator, ...]:
    """What the drivers show; from torch also how much memory, if it is in use anyway."""
    nothing: list[Accelerator] = []
    found = _try(_from_torch, nothing)
    if not found:
        found = _try(lambda: _from_nvidia(root), nothing) + _try(lambda: _from_amd(root), nothing)
    if not found and _is_apple_silicon():
        found = [Accelerator("mps", "Apple silicon")]
    return tuple(found[:_MOST])


def _from_torch() -> list[Accelerator]:
    """Only where CUDA has been started: starting it takes seconds and memory."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    kind = "rocm" if torch.version.hip else "cuda"
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [Accelerator(kind, _clean(each.name), int(each.total_memory)) for each in devices]


def _from_nvidia(root: Path) -> list[Accelerator]:
    found = []
    for device in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = device.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2] for line in lines if line.startswith("Model:")]
        found.append(Accelerator("cuda", _clean(names[0] if names else "")))
    return found


def _from_amd(root: Path) -> list[Accelerator]:
    found = []
    for device in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        words = dict(line.split(maxsplit=1) for line in device.read_text().splitlines())
        if int(words.get("simd_count", "0")):  # a node without is a processor
            name = device.with_name("name").read_text(encoding="utf-8", errors="replace")
            found.append(Accelerator("rocm", _clean(name)))
    return found
