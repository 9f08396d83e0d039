"""What the study of convergence trains: a small transformer, on text that is made up as it goes.

The text is a chain of words: how often a word comes falls with its rank, as in any language, and
what follows a word depends on it.  So there are frequent and rare things to learn, and a loss below
which nobody gets.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Text", "Transformer"]

WORDS = 256
LENGTH = 24  # words of a sentence
WIDTH = 48
HEADS = 4
LAYERS = 2
STEEPNESS = 1.1  # how fast words become rare: the exponent of Zipf's law
TASTE = 1.5  # how much it matters which word came before


class Text:
    """An endless source of sentences."""

    def __init__(self, seed: int) -> None:
        world = np.random.default_rng(1000 + seed)
        popularity = -STEEPNESS * np.log(world.permutation(WORDS) + 1)
        chances = np.exp(popularity + TASTE * world.standard_normal((WORDS, WORDS)))
        self._below = (chances / chances.sum(axis=1, keepdims=True)).cumsum(axis=1)
        self._dice = np.random.default_rng(2000 + seed)

    def throw_again(self, seed: int) -> None:
        """Go on with other sentences of the same language."""
        self._dice = np.random.default_rng(3000 + seed)

    def sentences(self, count: int) -> Tensor:
        """Some more; a row each, with one word more than the transformer reads."""
        words = np.empty((count, LENGTH + 1), np.int64)
        words[:, 0] = self._dice.integers(0, WORDS, count)
        thrown = self._dice.random((count, LENGTH + 1))
        for place in range(1, LENGTH + 1):
            below = self._below[words[:, place - 1]] < thrown[:, place, None]
            words[:, place] = np.minimum(below.sum(axis=1), WORDS - 1)
        return torch.from_numpy(words)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_thought = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ask, self.answer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, state: Tensor) -> Tensor:
        count, length, _ = state.shape
        asked = self.ask(self.before_attention(state)).chunk(3, dim=-1)
        q, k, v = (part.view(count, length, HEADS, -1).transpose(1, 2) for part in asked)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        state = state + self.answer(seen.transpose(1, 2).reshape(count, length, WIDTH))
        thought: Tensor = self.think(self.before_thought(state))
        return state + thought


class Transformer(nn.Module):
    """Guesses each next word."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.word = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.guess = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def loss(self, sentences: Tensor) -> Tensor:
        """Cross entropy of every next word."""
        guesses = self.guess(self.blocks(self.word(sentences[:, :-1]) + self.place))
        return nn.functional.cross_entropy(guesses.flatten(0, 1), sentences[:, 1:].flatten())
