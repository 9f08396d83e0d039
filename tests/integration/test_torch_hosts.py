"""PyTorch on several machines: ``potluck run`` on each, and the weights of a single process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from support.command import COMMAND
from support.hosts import Hosts
from support.paired_hosts import pair, variables
from support.threads import PATIENCE

pytestmark = pytest.mark.netns

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


def test_two_machines_with_three_workers_train_as_one_process(tmp_path: Path) -> None:
    """Two workers on one and one on the other: places, addresses and weights fit together."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with Hosts("alpha beta") as hosts:
        alpha, beta = hosts.values()
        pair(tmp_path, alpha, beta)
        runs = [
            subprocess.Popen(
                host.command([str(COMMAND), "run", "--per-node", count, str(script)]),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=variables(tmp_path, host),
            )
            for host, count in ((alpha, "2"), (beta, "1"))
        ]
        told = [run.communicate(timeout=2 * PATIENCE) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told
    lines = [line for output, _ in told for line in output.splitlines()]
    found = [json.loads(line[line.index("[{") :]) for line in lines]
    assert sorted(facts["RANK"] for facts, _ in found) == ["0", "1", "2"]
    assert {facts["GROUP_RANK"] for facts, _ in found} == {"0", "1"}
    masters = {facts["MASTER_ADDR"] for facts, _ in found}
    assert masters <= {alpha.ipv4, alpha.ipv6} or masters <= {beta.ipv4, beta.ipv6}
    alone = torch.tensor(train_alone())
    for _, weights in found:
        assert torch.allclose(torch.tensor(weights), alone, atol=1e-6)
