"""The examples for PyTorch run as they stand, on two ranks, for a few steps."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

from support.place import Place
from support.ports import free_port
from support.ranks import Ranks
from support.torch_ranks import environment

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(place: Place, name: str, port: int, arguments: list[str]) -> str:
    """Run a script as torchrun would, and return what it prints."""
    environment(place, port)
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.argv = [f"{name}.py", *arguments]
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.filterwarnings("error", message=".*FSDP.*")
        spec.loader.exec_module(script)
        script.main()
    return printed.getvalue()


def test_digits_are_learned(ranks: Ranks) -> None:
    """After a thousand pictures far more are read right than by chance."""
    arguments = ["--epochs", "2", "--pictures", "1500", "--compression", "int8"]
    first, second = ranks.run(run_example, 2, "ddp_mnist_like", free_port(), arguments)
    assert second == ""
    reached = [float(part) for part in re.findall(r"epoch \d: (\S+)% of", first)]
    assert len(reached) == 2
    assert reached[-1] > 30


def test_the_transformer_learns_to_write(ranks: Ranks) -> None:
    """Sharded and replicated, the loss is the same at every step, and falls."""
    losses = []
    for options in ([], ["--replicate"]):
        arguments = ["--steps", "12", "--letters", "5", *options]
        first, second = ranks.run(run_example, 2, "nanogpt", free_port(), arguments)
        assert second == ""
        losses.append([float(part) for part in re.findall(r"loss (\S+)", first)])
        assert len(first.splitlines()) > 2
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 0.8


def run_page(place: Place, folder: str, port: int) -> int:
    """Run the examples of the page as one program; how many there were.

    Those for other packages are run by test_torch_frameworks.py.
    """
    environment(place, port)
    text = (EXAMPLES.parent / "docs" / "pytorch.md").read_text(encoding="utf-8")
    text = re.sub(r"^## Accelerate, .*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    program = Path(folder) / "page.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("page", program)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return len(blocks)


def test_the_examples_of_the_page_are_true(ranks: Ranks, tmp_path: Path) -> None:
    """As they stand, in a process alone."""
    assert ranks.run(run_page, 1, str(tmp_path), free_port()) == [2]
