"""Train a small character transformer together: an ordinary PyTorch script, sharded with FSDP2.

It learns to write like ``nanogpt.txt`` beside it.  Every rank holds a part of the parameters; with
``--replicate`` every rank holds all of them, and gradients are averaged (DistributedDataParallel).

    potluck run --per-node 2 examples/nanogpt.py              # two processes on this machine
    potluck run examples/nanogpt.py                           # type this on each machine
    torchrun --nproc-per-node 2 examples/nanogpt.py           # the same with PyTorch's launcher
    python examples/nanogpt.py --steps 500                    # alone
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import potluck
import potluck.torch

TEXT = Path(__file__).with_name("nanogpt.txt")
SPAN = 64  # characters that the model sees at once
WIDTH, HEADS, LAYERS = 96, 4, 3


class Block(nn.Module):
    """A transformer block: causal attention, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.look, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the output of both layers to the input."""
        count, length, _ = x.shape
        parts = self.look(self.before(x)).view(count, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(count, length, WIDTH))
        out: torch.Tensor = x + self.think(self.after(x))
        return out


class Writer(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.what, self.where = nn.Embedding(characters, WIDTH), nn.Embedding(SPAN, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of the next character, one row per position."""
        seen = self.what(text) + self.where(torch.arange(text.shape[1]))
        scores: torch.Tensor = self.out(self.last(self.blocks(seen)).flatten(0, 1))
        return scores


def distributed(model: Writer, options: argparse.Namespace) -> nn.Module:
    """Shard the model over all ranks, or replicate it."""
    if not options.replicate:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)  # in place
        return model
    copies = DistributedDataParallel(model)
    if options.compression != "none":
        copies.register_comm_hook(None, potluck.torch.compress_hook(options.compression))
    return copies


def batch(text: torch.Tensor, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Passages, and the same passages shifted by one character."""
    starts = torch.randint(len(text) - SPAN - 1, (16,), generator=source)
    passages = torch.stack([text[start : start + SPAN + 1] for start in starts.tolist()])
    return passages[:, :-1], passages[:, 1:]


def write(model: nn.Module, letters: list[str], length: int) -> str:
    """Sample a text from the model; all ranks take part, since each holds a part of it."""
    text = torch.tensor([[letters.index("\n")]])
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(length):
            scores = model(text[:, -SPAN:])[-1]
            chosen = torch.multinomial(torch.softmax(scores / 0.8, 0), 1, generator=source)
            text = torch.cat([text, chosen.view(1, 1)], dim=1)
    return "".join(letters[index] for index in text[0].tolist())


def train(options: argparse.Namespace) -> None:
    """Train, then print a sample."""
    written = TEXT.read_text(encoding="utf-8")
    letters = sorted(set(written))
    text = torch.tensor([letters.index(letter) for letter in written])
    torch.manual_seed(0)
    model = distributed(Writer(len(letters)), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    source = torch.Generator().manual_seed(dist.get_rank())  # every rank reads other passages
    begun, mean = time.monotonic(), torch.tensor(math.log(len(letters)))
    for step in range(options.steps):
        passages, following = batch(text, source)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(passages), following.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        if step % 50 == 0 or step == options.steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"step {step:4}  loss {mean:.3f}  {time.monotonic() - begun:5.1f} s")
    sample = write(model, letters, options.letters)
    if dist.get_rank() == 0:
        print(sample)


def main() -> None:
    """Join the others, train, leave."""
    parser = argparse.ArgumentParser(description="A small transformer, on Potluck.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--letters", type=int, default=300, help="length of the text in the end")
    parser.add_argument("--replicate", action="store_true", help="a whole model on every rank")
    parser.add_argument("--compression", default="none", help="with --replicate: int8, auto ...")
    options = parser.parse_args()
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, alone)
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("potluck")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
