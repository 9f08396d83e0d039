"""What a script uses is found without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.apps.cli.run_child import facts_of
from potluck.apps.cli.run_imports import imports


@pytest.mark.parametrize(
    ("script", "is_used"),
    [
        ("import torch", True),
        ("def later():\n    from torch.nn import Linear", True),
        ("import potluck.torch", True),
        ("from potluck import torch", True),
        ("import torchvision_of_mine", False),
        ("import potluck, numpy", False),
        ("print('import torch')", False),
        ("from .model import Net", True),
        ("import model", True),
        ("import package.part", True),
        ("import other", False),
        ("this is no Python", True),
    ],
)
def test_a_script_uses_what_it_imports(tmp_path: Path, script: str, *, is_used: bool) -> None:
    """Itself, in a function, or by modules that lie beside it."""
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "model.py").write_text("import torch, train")
    (tmp_path / "other.py").write_text("import other, train.nothing")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("import torch.nn")
    assert imports(tmp_path / "train.py", "torch") is is_used


def test_versions_of_pytorch_are_no_concern_of_a_script_without_it(tmp_path: Path) -> None:
    """Machines with and without PyTorch say the same."""
    script = tmp_path / "train.py"
    script.write_text("import numpy")
    assert facts_of(script, [])["torch"] == ""
    script.write_text("import torch")
    assert facts_of(script, [])["torch"]
