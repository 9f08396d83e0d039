"""Plain words on the screen: types in help as people know them, sentences that break at words."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Any

import typer.core

__all__ = ["PlainCommand", "PlainGroup", "wrapped"]

WORDS = {
    "bool": "",
    "str": "TEXT",
    "path": "PATH",
    "int": "NUMBER",
    "int range": "NUMBER",
    "float": "NUMBER",
    "float range": "NUMBER",
}
"""What a value is called in help, by what typer calls it; a flag takes none."""


def _in_plain_words(params: list[Any], context: Any) -> list[Any]:
    """The same parameters, without types of Python in what is shown of them."""
    for param in params:
        if not hasattr(param, "display_type"):
            continue  # a typer before 0.29 has other words, which are plain
        if param.param_type_name == "argument":
            param.metavar = param.metavar or str(param.name).upper()
            param.display_type_rich = lambda ctx: None  # noqa: ARG005 - its name says it
        elif param.metavar is None:
            param.metavar = WORDS.get(str(param.display_type(context)).strip("<>"))
    return params


class PlainCommand(typer.core.TyperCommand):
    """A command whose help people can read."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its arguments and options."""
        return _in_plain_words(super().get_params(ctx), ctx)


class PlainGroup(typer.core.TyperGroup):
    """The same for the command of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options."""
        return _in_plain_words(super().get_params(ctx), ctx)


def wrapped(text: str) -> str:
    """A text for stderr: in a terminal its lines end between words.

    Anywhere else it stays one line, for programs that read it.
    """
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
