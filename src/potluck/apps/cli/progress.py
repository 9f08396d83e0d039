"""A sign that something happens, for a person at a terminal; everybody else sees nothing."""

from __future__ import annotations

import contextlib

__all__ = ["working"]


def working(words: str, *, silent: bool = False) -> contextlib.AbstractContextManager[object]:
    """Show these words and a moving sign on stderr while a block runs."""
    from rich.console import Console

    console = Console(stderr=True)
    if silent or not console.is_terminal or console.is_dumb_terminal:
        return contextlib.nullcontext()
    return console.status(words)
