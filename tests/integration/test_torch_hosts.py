"""PyTorch on several machines: ``potluck run`` on each, and the weights of a single process."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.command import COMMAND, end_all
from support.hosts import Host, Hosts
from support.paired_hosts import pair, variables
from support.threads import PATIENCE

pytestmark = [pytest.mark.netns, pytest.mark.slow]

TRAIN = """
import json, os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import potluck.torch

torch.set_num_threads(1)
dist.init_process_group("potluck", init_method="potluck://")
assert dist.get_rank() == int(os.environ["RANK"])
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
torch.manual_seed(3)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.arange(24.0).reshape(6, 4) / 24
for _ in range(4):
    optimizer.zero_grad()
    model(batch[dist.get_rank() :: dist.get_world_size()]).square().mean().backward()
    optimizer.step()
weights = [each.flatten().tolist() for each in model.parameters()]
facts = {name: os.environ[name] for name in ("RANK", "GROUP_RANK", "MASTER_ADDR")}
print(json.dumps([facts, sum(weights, [])]), flush=True)
dist.destroy_process_group()
"""


def train_alone() -> list[float]:
    """The same on the whole batch."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.arange(24.0).reshape(6, 4) / 24
    for _ in range(4):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [number for each in model.parameters() for number in each.flatten().tolist()]


@contextlib.contextmanager
def running(folder: Path, host: Host, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``potluck run`` on a host; it is gone at the end, and whatever it started as well."""
    command = host.command([str(COMMAND), "run", *arguments])
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables(folder, host),
    ) as process:
        try:
            yield process
        finally:
            end_all(process.pid)


@pytest.mark.timeout(5 * PATIENCE)  # three times PyTorch is imported, with all that replicas need
def test_two_machines_with_three_workers_train_as_one_process(tmp_path: Path) -> None:
    """Two workers on one and one on the other: places, addresses and weights fit together."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with Hosts("alpha beta") as hosts:
        alpha, beta = hosts.values()
        pair(tmp_path, alpha, beta)
        with (
            running(tmp_path, alpha, "--per-node", "2", str(script)) as two,
            running(tmp_path, beta, str(script)) as one,
        ):
            told = [run.communicate(timeout=4 * PATIENCE) for run in (two, one)]
            assert (two.returncode, one.returncode) == (0, 0), told
    lines = [line for output, _ in told for line in output.splitlines()]
    found = [json.loads(line[line.index("[{") :]) for line in lines]
    assert sorted(facts["RANK"] for facts, _ in found) == ["0", "1", "2"]
    assert {facts["GROUP_RANK"] for facts, _ in found} == {"0", "1"}
    masters = {facts["MASTER_ADDR"] for facts, _ in found}
    assert masters <= {alpha.ipv4, alpha.ipv6} or masters <= {beta.ipv4, beta.ipv6}
    alone = torch.tensor(train_alone())
    for _, weights in found:
        assert torch.allclose(torch.tensor(weights), alone, atol=1e-6)
