"""The profile of this machine: true, quick, and without an error on the strangest of machines."""

import os
import platform
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from potluck import NodeProfile
from potluck.core.topology_nodes import Accelerator, Battery
from potluck.runtime.profile import local_profile


def plant(root: Path, files: dict[str, str]) -> Path:
    """A machine with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_the_profile_of_this_machine_is_true() -> None:
    """As far as another look at the machine can tell, and it survives the journey."""
    profile = local_profile()
    assert profile.python == platform.python_version()
    assert profile.system.startswith(platform.system())
    assert 1 <= profile.cores <= (os.cpu_count() or 1)
    assert 0 < profile.available_memory <= profile.memory <= psutil.virtual_memory().total
    assert NodeProfile.from_bytes(profile.to_bytes()) == profile


def test_it_takes_less_than_fifty_milliseconds() -> None:
    """The best of several, for the machine is shared."""
    local_profile()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        local_profile()
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.05


def test_it_imports_no_framework() -> None:
    """Whoever has no torch loaded gets none."""
    before = set(sys.modules)
    local_profile()
    assert {"torch", "jax", "mlx"} & (set(sys.modules) - before) == set()


def test_a_machine_that_tells_nothing_has_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every question fails; what is left is: not known."""

    def fail(*_: object, **__: object) -> None:
        raise PermissionError

    for module, name in [
        (platform, "system"),
        (platform, "machine"),
        (platform, "python_version"),
        (psutil, "cpu_count"),
        (psutil, "virtual_memory"),
        (psutil, "sensors_battery"),
        (os, "sched_getaffinity"),
    ]:
        monkeypatch.setattr(module, name, fail, raising=False)
    monkeypatch.setattr("socket.gethostname", fail)
    assert local_profile(root=tmp_path) == NodeProfile()


def test_a_container_counts_with_its_limits(tmp_path: Path) -> None:
    """Half a core is one; no limit is no limit."""
    limited = plant(
        tmp_path / "limited",
        {"sys/fs/cgroup/cpu.max": "50000 100000\n", "sys/fs/cgroup/memory.max": "1048576\n"},
    )
    profile = local_profile(root=limited)
    assert (profile.cores, profile.memory) == (1, 1 << 20)
    assert profile.available_memory <= 1 << 20
    free = plant(
        tmp_path / "free",
        {"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/memory.max": "max\n"},
    )
    assert local_profile(root=free).cores == local_profile().cores
    assert local_profile(root=free).memory == psutil.virtual_memory().total


def test_the_processor_has_the_name_it_is_sold_under(tmp_path: Path) -> None:
    """Without what could play tricks on a terminal."""
    text = "processor\t: 0\nmodel name\t: Some  \x1b[31mChip 9000\nmodel name\t: another\n"
    assert local_profile(root=plant(tmp_path, {"proc/cpuinfo": text})).processor == (
        "Some [31mChip 9000"
    )
    assert local_profile(root=plant(tmp_path, {"proc/cpuinfo": "nothing"})).processor == ""


def test_accelerators_are_found_by_their_drivers(tmp_path: Path) -> None:
    """Of both makers; a node of the AMD driver without vector units is a processor."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    root = plant(
        tmp_path,
        {
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t GeForce RTX\nIRQ: 1\n",
            "proc/driver/nvidia/gpus/0000:02:00.0/information": "IRQ: 2\n",
            f"{nodes}/0/properties": "cpu_cores_count 16\nsimd_count 0\n",
            f"{nodes}/0/name": "\n",
            f"{nodes}/1/properties": "cpu_cores_count 0\nsimd_count 80\n",
            f"{nodes}/1/name": "navi21\n",
        },
    )
    assert local_profile(root=root).accelerators == (
        Accelerator("cuda", "GeForce RTX"),
        Accelerator("cuda", ""),
        Accelerator("rocm", "navi21"),
    )


def test_torch_is_asked_only_where_it_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting CUDA for a profile would take seconds; one that runs knows the memory too."""
    torch = ModuleType("torch")
    device = SimpleNamespace(name="GeForce RTX", total_memory=8 << 30)
    running = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda _: device,
    )
    torch.cuda = running  # type: ignore[attr-defined]
    torch.version = SimpleNamespace(hip=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    expected = (Accelerator("cuda", "GeForce RTX", 8 << 30),)
    assert local_profile(root=tmp_path).accelerators == expected
    running.is_initialized = lambda: False
    assert local_profile(root=tmp_path).accelerators == ()


def test_apple_silicon_has_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares the machine's memory."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    profile = local_profile(root=tmp_path)
    assert profile.accelerators == (Accelerator("mps", "Apple silicon"),)
    assert profile.processor == "Apple silicon"


def test_a_laptop_tells_its_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within bounds, whatever the battery says of itself."""
    state = SimpleNamespace(percent=104.2, power_plugged=None)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: state, raising=False)
    assert local_profile().battery == Battery(100, plugged=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert local_profile().battery is None
