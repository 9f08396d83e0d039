"""Frameworks on PyTorch: the lines of docs/pytorch.md run with the real packages, as on Gloo."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support.pages import ROOT, blocks
from support.place import Place
from support.ports import free_port
from support.ranks import Ranks
from support.torch_ranks import environment, in_a_child

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]

WITHIN = 240.0
"""Seconds for two ranks to import a framework and to train on two backends."""

PAGE = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")


def lines_for(title: str, backend: str) -> str:
    """The program under a heading of the page; on Gloo only the name of the backend differs."""
    part = re.search(rf"^### {title}$(.*?)^##", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert part is not None, f"docs/pytorch.md has no heading {title!r}"
    (program,) = blocks(part[1], "python")
    assert program.count('"potluck"') == 1
    return program.replace('"potluck"', f'"{backend}"')


def on_two_backends(
    place: Place, module: str, ports: list[int], train: Callable[[str], Any]
) -> Any:
    """What a training returns on Gloo and on ours, each in a process that has run nothing yet."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(place.rank),
        "LOCAL_WORLD_SIZE": str(place.world_size),
    }
    torch.set_num_threads(1)  # ranks share few processors
    importlib.import_module("potluck.torch")
    importlib.import_module(module)

    def run(backend: str, port: int) -> Any:
        environment(place, port)
        torch.manual_seed(0)
        found = train(backend)
        assert dist.get_backend() == backend
        dist.destroy_process_group()
        return found

    pairs = zip(("gloo", "potluck"), ports, strict=True)
    return [in_a_child(functools.partial(run, *pair)) for pair in pairs]


def check_equal(ranks: Ranks, program: Callable[..., Any], *arguments: Any) -> Any:
    """Train on both backends: each rank has found the same numbers.  Returns those of rank 0."""
    ports = [free_port(), free_port()]
    found = ranks.run(program, 2, *arguments, ports, timeout=WITHIN, fresh=True)
    for theirs, ours in found:
        assert len(theirs) == len(ours) > 2
        assert torch.allclose(torch.tensor(theirs), torch.tensor(ours), atol=1e-6)
    return found[0][1]


def small_model() -> nn.Module:
    """A model of two layers."""
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


def small_data() -> TensorDataset:
    """Numbers and what is to be made of them."""
    inputs = torch.randn(32, 4)
    return TensorDataset(inputs, inputs[:, :2].square())


def numbers_of(model: nn.Module) -> list[float]:
    """All parameters."""
    return [each for part in model.parameters() for each in part.detach().flatten().tolist()]


# -- Accelerate ----------------------------------------------------------------------------------


def accelerate(place: Place, ports: list[int]) -> Any:
    """The loss of the last step, and the parameters."""

    def train(backend: str) -> list[float]:
        model = small_model()
        names: dict[str, Any] = {
            "torch": torch,
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
            "batches": DataLoader(small_data(), batch_size=4),
        }
        exec(lines_for("Accelerate", backend), names)  # noqa: S102 - lines of our own page
        assert isinstance(names["model"], nn.parallel.DistributedDataParallel)
        everywhere = names["accelerator"].gather(names["loss"].detach()).tolist()
        assert everywhere[0] != everywhere[1]  # each rank has had its own part of the data
        return [*everywhere, *numbers_of(model)]

    return on_two_backends(place, "accelerate", ports, train)


def test_accelerate_trains_as_on_gloo(ranks: Ranks) -> None:
    """It prepares model, optimizer and data for the group that is there."""
    check_equal(ranks, accelerate)


# -- Transformers --------------------------------------------------------------------------------


def transformers(place: Place, folder: str, ports: list[int]) -> Any:
    """The losses that were logged, and the parameters."""

    def train(backend: str) -> list[float]:
        library: Any = importlib.import_module("transformers")
        config = library.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
        texts = torch.randint(0, 32, (64, 8))
        model = library.LlamaForCausalLM(config)
        names: dict[str, Any] = {
            "model": model,
            "examples": [{"input_ids": text, "labels": text} for text in texts],
        }
        os.chdir(folder)
        exec(lines_for("Trainer of Transformers", backend), names)  # noqa: S102
        history = names["trainer"].state.log_history
        losses = [each["loss"] for each in history if "loss" in each]
        assert len(losses) == 4
        return [*losses, *numbers_of(model)]

    return on_two_backends(place, "transformers", ports, train)


def test_the_trainer_of_transformers_trains_as_on_gloo(ranks: Ranks, tmp_path: Path) -> None:
    """A model built from a configuration: nothing is downloaded."""
    check_equal(ranks, transformers, str(tmp_path))


# -- Lightning -----------------------------------------------------------------------------------


def module_of_lightning() -> Any:
    """A module that logs numbers of several types, from all ranks."""
    library: Any = importlib.import_module("lightning.pytorch")

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = small_model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            count = torch.tensor(3 + index + self.global_rank)  # int64
            self.log("count", count, sync_dist=True)
            self.log("epoch", count, sync_dist=True, on_step=False, on_epoch=True)
            self.log("most", count, sync_dist=True, reduce_fx="max")
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def lightning(place: Place, folder: str, ports: list[int]) -> Any:
    """What was logged, a mean of integers, and the parameters."""

    def train(backend: str) -> list[float]:
        module = module_of_lightning()
        batches = DataLoader(small_data(), batch_size=4)
        names: dict[str, Any] = {"module": module, "batches": batches}
        os.chdir(folder)
        exec(lines_for("Lightning", backend), names)  # noqa: S102 - lines of our own page
        trainer = names["trainer"]
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        assert (logged["count"], logged["most"]) == (6.5, 7.0)
        means = [
            trainer.strategy.reduce(torch.tensor(value + place.rank), reduce_op="mean")
            for value in (3, -4, 2**53)
        ]
        assert [mean.dtype for mean in means] == [torch.int64] * 3
        assert [mean.item() for mean in means[:2]] == [3, -3]
        logged["mean"] = means[2].item()
        return [*(logged[name] for name in sorted(logged)), *numbers_of(module)]

    return on_two_backends(place, "lightning.pytorch", ports, train)


def test_lightning_trains_and_logs_as_on_gloo(ranks: Ranks, tmp_path: Path) -> None:
    """With values of all ranks in the log, integers included."""
    check_equal(ranks, lightning, str(tmp_path))


# -- DeepSpeed -----------------------------------------------------------------------------------


def deepspeed(place: Place, ports: list[int]) -> Any:
    """The loss of the last step and the parameters, for each stage."""
    ops: Any = importlib.import_module("deepspeed.ops")
    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute, for inference

    def train_at(stage: int, backend: str) -> list[float]:
        library: Any = importlib.import_module("deepspeed")
        torch.manual_seed(0)
        model = small_model()
        mine = torch.utils.data.Subset(small_data(), range(place.rank, 32, place.world_size))
        names: dict[str, Any] = {
            "torch": torch,
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
            "batches": DataLoader(mine, batch_size=4),
        }
        program = lines_for("DeepSpeed", backend)
        assert program.count('"stage": 3') == 1
        if stage > 0:  # the group is there
            program = re.sub(r"^dist\.init_process_group.*$", "", program, flags=re.MULTILINE)
        exec(program.replace('"stage": 3', f'"stage": {stage}'), names)  # noqa: S102
        assert names["engine"].zero_optimization_stage() == stage
        with library.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return [names["loss"].item(), *numbers_of(model)]

    def train(backend: str) -> list[list[float]]:
        return [train_at(stage, backend) for stage in STAGES]

    return on_two_backends(place, "deepspeed", ports, train)


STAGES = range(4)


def test_every_stage_of_zero_trains_as_on_gloo(ranks: Ranks) -> None:
    """Whether nothing is sharded, or the optimizer's state, the gradients, the parameters."""
    stages = check_equal(ranks, deepspeed)
    assert len(stages) == len(STAGES)
    for stage in stages[1:]:  # sharding is another way to do the same
        assert torch.allclose(torch.tensor(stage), torch.tensor(stages[0]), atol=1e-5)
