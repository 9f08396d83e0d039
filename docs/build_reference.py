"""The page ``reference.md``: every public name with its signature, docstring and members."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import potluck
from potluck._future import Future

__all__ = ["page"]

DOCS = Path(__file__).parent

HEAD = """\
# Reference

Every public name, from its docstring; `make docs` writes this page, and a test compares it with the
code. Each example runs by itself in a fresh interpreter, as it is printed; a test does that.
[api.md](api.md) is the same as one table.
"""

FUTURE = ("done", "wait", "result", "exception", "add_done_callback")
"""What every future has for those who wait for it."""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, names in _sections().items():
        parts.append(f"## {title}\n")
        parts += [_entry(name) for name in names]
    return "\n".join(parts).rstrip() + "\n"


def _sections() -> dict[str, list[str]]:
    """The headings of api.md and the names below each."""
    sections: dict[str, list[str]] = {}
    title = ""
    for line in (DOCS / "api.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif (found := re.match(r"\| `(\w+)` \| ", line)) and found[1] in potluck.__all__:
            sections.setdefault(title, []).append(found[1])
    return sections


def _entry(name: str) -> str:
    thing = getattr(potluck, name)
    lines = [f"### `{name}`\n"]
    if shown := _signature(thing, name):
        lines.append(f"```text\n{shown}\n```\n")
    lines.append(_markdown(inspect.getdoc(thing) or "", thing))
    if inspect.isclass(thing):
        lines += _members(thing)
    return "\n".join(lines) + "\n"


def _members(thing: type) -> list[str]:
    """Its own public methods and properties, one line each; a future's also."""
    found = dict(vars(thing))
    if issubclass(thing, Future):
        found = {name: vars(Future)[name] for name in FUTURE} | found
    rows = []
    for name, member in found.items():
        if name.startswith("_"):
            continue
        inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        doc = inspect.getdoc(inner.fget if isinstance(inner, property) else inner)
        if isinstance(inner, property):
            rows.append(f"* `{name}`: {_first(doc)}")
        elif inspect.isfunction(inner):
            rows.append(
                f"* `{_signature(inner, name, bound=not isinstance(member, staticmethod))}`"
                f": {_first(doc)}"
            )
    return ["", *rows] if rows else []


def _signature(thing: Any, name: str, *, bound: bool = False) -> str:
    """As one would write it down; types are in the source."""
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return ""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    parameters = list(signature.parameters.values())
    if bound and parameters and parameters[0].name in {"self", "cls"}:
        parameters = parameters[1:]
    shown = []
    for each in parameters:
        each = each.replace(annotation=inspect.Parameter.empty)  # noqa: PLW2901
        if each.default is not inspect.Parameter.empty and not _is_plain(each.default):
            each = each.replace(default=_Shown(each.default))  # noqa: PLW2901
        shown.append(each)
    bare = signature.replace(parameters=shown, return_annotation=inspect.Signature.empty)
    return (
        "\n".join(textwrap.wrap(f"{name}{bare}", 98, subsequent_indent="    "))
        if not bound
        else f"{name}{bare}"
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple)


class _Shown:
    """A default that is too long to show, or differs from run to run."""

    def __init__(self, value: Any) -> None:
        self._text = repr(value) if len(repr(value)) < 40 and " at 0x" not in repr(value) else "…"  # noqa: PLR2004

    def __repr__(self) -> str:
        return self._text


def _first(doc: str | None) -> str:
    text = _roles((doc or "").split("\n\n")[0])
    return " ".join(text.split())


def _markdown(doc: str, thing: Any) -> str:
    """A docstring as Markdown: examples become blocks."""
    parts: list[str] = []
    example: list[str] = []
    for line in [*doc.splitlines(), ""]:
        is_example = line.startswith(">>> ") or (example and line.strip())
        if is_example:
            example.append(line)
            continue
        if example:
            parts += ["```pycon", *_imports(example, thing), *example, "```"]
            example = []
        parts.append(_roles(line))
    return "\n".join(parts).strip() + "\n"


def _imports(example: list[str], thing: Any) -> list[str]:
    """The imports that an example needs and does not make: in its module the names are there."""
    examples = doctest.DocTestParser().get_examples("\n".join(example))
    source = "".join(each.source for each in examples)
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    made = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    needed = sorted({each.id for each in names} - made)
    public = [name for name in needed if name in potluck.__all__]
    lines = [">>> import numpy as np"] if "np" in needed else []
    if "potluck" in needed:
        lines.append(">>> import potluck")
    if public:
        lines.append(f">>> from potluck import {', '.join(public)}")
    for name in [each for each in needed if each not in potluck.__all__]:
        home = sys.modules[thing.__module__]
        value = vars(home).get(name)
        if name != "np" and value is not None and not inspect.ismodule(value):
            lines.append(f">>> from {getattr(value, '__module__', home.__name__)} import {name}")
    return lines


def _roles(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return re.sub(r"``(.+?)``", r"`\1`", text)
