"""Pages of the documentation as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def pages() -> list[Path]:
    """README, CONTRIBUTING, the page about the examples, and everything in docs."""
    single = ("README.md", "CONTRIBUTING.md", "examples/README.md")
    return [*(ROOT / each for each in single), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    """All fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def languages(text: str) -> set[str]:
    """The languages of all fenced blocks of a page; "" for a block without one."""
    fences = re.findall(r"^```(.*)$", text, flags=re.MULTILINE)
    return set(fences[::2])
