"""Memory whose size others may have chosen: where it is taken, and how much a block takes."""

from __future__ import annotations

import ast
import contextlib
import tracemalloc
from collections.abc import Iterator, Mapping

from support.architecture import Module

LAYERS = frozenset({"identity", "net", "discovery", "trust", "backend", "membership"})
MODULES = frozenset({"rpc.protocol", "training.steps"})
"""Where bytes from outside come through; what is above gets them in buffers of its own."""

MAKERS = frozenset({"bytearray", "empty", "zeros", "ones", "full"})
"""Calls that take as much memory as their first argument says."""

READERS = frozenset({"read_bytes", "read_text", "readline", "readlines", "makefile"})
"""Calls that read until somebody else ends it."""


def found(modules: Mapping[str, Module]) -> dict[str, str]:
    """Function -> the call in it whose size is not fixed in the source."""
    return {
        place: ast.unparse(call)
        for name, module in modules.items()
        if module.layer in LAYERS or module.path in MODULES
        for place, call in _calls(module.tree, name)
        if not _is_bounded(call)
    }


def _calls(node: ast.AST, place: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inside = place
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inside = f"{place}.{child.name}"
        if isinstance(child, ast.Call):
            yield place, child
        yield from _calls(child, inside)


def _is_bounded(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in READERS:
        return bool(call.args)
    return name not in MAKERS or all(_is_fixed(argument) for argument in call.args[:1])


def _is_fixed(size: ast.expr) -> bool:
    """Whether a size is made of numbers and constants alone."""
    if isinstance(size, ast.BinOp):
        return _is_fixed(size.left) and _is_fixed(size.right)
    if isinstance(size, ast.Attribute):
        return _is_fixed(size.value)
    if isinstance(size, ast.Name):
        return size.id.isupper()
    return isinstance(size, ast.Constant)


@contextlib.contextmanager
def allocating_at_most(count: int) -> Iterator[None]:
    """Fail a block that has more bytes of new memory at any time, numpy's included."""
    tracemalloc.start()
    try:
        yield
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most <= count, f"{most} bytes were taken at once"
