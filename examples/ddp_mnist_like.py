"""Train an image classifier on several processes or machines: an ordinary PyTorch script.

The task is like MNIST, but the pictures are drawn instead of downloaded: digits of a small font,
shifted, slanted, scaled and noisy.  The three lines that make it run on Potluck are marked.

    potluck run --per-node 2 examples/ddp_mnist_like.py         # two processes on this machine
    potluck run examples/ddp_mnist_like.py                      # type this on each machine
    torchrun --nproc-per-node 2 examples/ddp_mnist_like.py      # the same with PyTorch's launcher
    python examples/ddp_mnist_like.py                           # alone
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import potluck
import potluck.torch  # 1: registers the backend

SIDE = 20
GLYPHS = (  # five rows of three dots for each digit
    *("111101101101111", "010110010010111", "111001111100111", "111001111001111"),
    *("101101111001001", "111100111001111", "111100111101111", "111001010010010"),
    *("111101111101111", "111101111001111"),
)


def draw(count: int, seed: int) -> TensorDataset:
    """Draw this many pictures; returns them with the digit that each shows."""
    source = torch.Generator().manual_seed(seed)
    digits = torch.randint(10, (count,), generator=source)
    font = torch.tensor([[float(dot) for dot in glyph] for glyph in GLYPHS]).view(10, 1, 5, 3)
    pictures = functional.interpolate(font[digits], size=(15, 9), mode="nearest")
    pictures = functional.pad(pictures, (5, SIDE - 14, 2, SIDE - 17))

    def spread(size: float) -> torch.Tensor:
        return (torch.rand(count, generator=source) - 0.5) * size

    turn = torch.zeros(count, 2, 3)
    turn[:, 0, 0], turn[:, 1, 1] = 1 + spread(0.5), 1 + spread(0.5)  # scale
    turn[:, 0, 1] = spread(0.6)  # slant
    turn[:, 0, 2], turn[:, 1, 2] = spread(0.4), spread(0.4)  # shift
    grid = functional.affine_grid(turn, [count, 1, SIDE, SIDE], align_corners=False)
    pictures = functional.grid_sample(pictures, grid, align_corners=False)
    return TensorDataset(pictures + 0.3 * torch.randn(pictures.shape, generator=source), digits)


def network() -> nn.Sequential:
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (SIDE // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of pictures that are read right; each rank evaluates its own part."""
    pictures, digits = (part[dist.get_rank() :: dist.get_world_size()] for part in data.tensors)
    with torch.no_grad():
        right = (model(pictures).argmax(1) == digits).float().sum()
    counts = torch.stack([right, torch.tensor(float(len(digits)))])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def train(options: argparse.Namespace) -> float:
    """Train on this rank's share of the pictures; returns the final accuracy."""
    torch.manual_seed(0)
    data, unseen = draw(options.pictures, seed=1), draw(1000, seed=2)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(network())
    if options.compression != "none":
        # 3: compress gradients; leave this out where the network is fast
        model.register_comm_hook(None, potluck.torch.compress_hook(options.compression))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    reached = 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for pictures, digits in loader:
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(pictures), digits))
            optimizer.step()
        reached = accuracy(model, unseen)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {reached:.1%} of unseen pictures are read right", flush=True)
    return reached


def main() -> None:
    """Join the others, train, leave."""
    parser = argparse.ArgumentParser(description="Digits, on Potluck.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=6000)
    parser.add_argument("--compression", default="auto", help="auto, int8, topk:0.01 ... or none")
    options = parser.parse_args()
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, alone)
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("potluck")  # 2: instead of "gloo" or "nccl"
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
