"""Train a small language model on machines that come and go.

Close a laptop's lid and the others continue without a lost step. Open it again and it catches up.
Stop everything and ``--resume`` continues from the last checkpoint.

    potluck run --per-node 3 examples/elastic.py       # three processes on this machine
    potluck run examples/elastic.py                    # type this on each machine
    potluck run --resume examples/elastic.py           # after a power cut
    python examples/elastic.py                         # alone

It learns to write like ``nanogpt.txt``, which every machine needs beside this file.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import potluck
from potluck import ElasticSampler
from potluck.torch.elastic import ElasticOptimizer

TEXT = Path(__file__).with_name("nanogpt.txt")
SPAN = 48  # characters in one sample


class Writer(nn.Module):
    """Predicts the next character at every position: an embedding, a GRU and a linear layer."""

    def __init__(self, characters: int, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of the next character, one row per position."""
        hidden, _ = self.gru(self.embed(text))
        scores: torch.Tensor = self.out(hidden.flatten(0, 1))
        return scores


def load_text() -> tuple[torch.Tensor, int]:
    """The text as numbers, and how many different characters it has."""
    written = TEXT.read_text(encoding="utf-8")
    letters = sorted(set(written))
    return torch.tensor([letters.index(letter) for letter in written]), len(letters)


def train(cluster: potluck.Cluster, options: argparse.Namespace) -> None:
    """Train until all machines together have made the number of steps asked for."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, characters = load_text()
    torch.manual_seed(0)
    model = Writer(characters).to(device)
    optimizer = ElasticOptimizer(
        torch.optim.Adam(model.parameters(), lr=3e-3),
        model,
        cluster,
        sampler=ElasticSampler(len(text) - SPAN),  # each passage once per epoch, on one machine
        batch=options.batch,  # of all machines together; faster machines take more of it
        checkpoints=options.checkpoints,
        save_every=options.save_every,
    )
    optimizer.start()  # fetch the weights from the machines that already train, or resume
    trainer = optimizer.trainer
    if trainer.step_count:
        print(f"continuing from step {trainer.step_count}", flush=True)
    while trainer.step_count < options.steps:
        starts = torch.from_numpy(trainer.take())
        passages = text[starts[:, None] + torch.arange(SPAN + 1)].to(device)
        optimizer.zero_grad()
        scores = model(passages[:, :-1])
        loss = functional.cross_entropy(scores, passages[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()  # one step of all machines; repeated without those that are lost
        time.sleep(options.slow)
        if trainer.step_count % 10 == 0:
            trainer.note_loss(loss.item())  # for the dashboard
            print(
                f"step {trainer.step_count:4}  rank {cluster.rank} of {cluster.world_size}"
                f"  {len(starts):3} samples  loss {loss.item():.3f}",
                flush=True,
            )


def main() -> None:
    """Join the other machines, train, leave."""
    parser = argparse.ArgumentParser(description="A small language model, elastic.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all machines")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--checkpoints", default="checkpoints", help="folder for checkpoints")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds to sleep in each step")
    options = parser.parse_args()
    with potluck.join() as cluster:
        train(cluster, options)


if __name__ == "__main__":
    main()
