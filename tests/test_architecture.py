"""The floor plan holds: imports point down, layers keep to their tools, everything stays small.

Each rule is also shown a planted violation, so that a rule that has gone blind is noticed.
"""

import re
from pathlib import Path

import pytest

from support import architecture

ROOT = Path(__file__).parent.parent
MODULES = architecture.load(ROOT / "src" / "potluck")

# Module -> why it is longer than 800 lines.  1,300 is the most.
LONG_FILES: dict[str, str] = {}


def planted(**sources: str) -> dict[str, architecture.Module]:
    """Modules of a small package; ``net__frames`` stands for ``potluck.net.frames``."""
    named = {
        f"potluck.{name.replace('__', '.')}": f'"""A planted module."""\n{source}'
        for name, source in sources.items()
    }
    return architecture.parse(named)


@pytest.mark.parametrize("check", architecture.CHECKS, ids=lambda check: str(check.__name__))
def test_the_source_keeps_to_the_plan(check: architecture.Check) -> None:
    """No checker finds anything in src/potluck."""
    assert check(MODULES) == []


def test_files_keep_to_the_size_budget() -> None:
    """No file is longer than it may be, and no excuse outlives its need."""
    assert architecture.file_sizes(MODULES, LONG_FILES) == []


def test_the_whole_package_is_read() -> None:
    """The checkers see every file of the package, so silence means something."""
    files = list((ROOT / "src" / "potluck").rglob("*.py"))
    assert len(MODULES) == len(files) > 5
    assert "potluck" in MODULES
    assert MODULES["potluck.backend"].is_package


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core__election", "import potluck.net.frames"),
        ("core__election", "from potluck.collective import ring"),
        ("collective__ring", "from potluck.core.election import Election"),
        ("net__tcp", "from ..backend.base import Backend"),
        ("net__tcp", "def late():\n    from potluck.runtime import control"),
        ("backend__mesh", "from potluck.runtime.control import Control"),
        ("runtime__control", "from potluck.training import elastic"),
        ("training__elastic", "from potluck.apps.cli import main"),
        ("errors", "from potluck.core import election"),
        ("errors", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import potluck.net"),
        ("torch", "from potluck.runtime import control"),
        ("testing__clock", "from potluck.apps import cli"),
        ("apps__cli", "from potluck.testing import clock"),
        ("net__tcp", "from potluck import TcpBackend"),
        ("net__tcp", "from importlib import import_module\nimport_module('potluck.backend.tcp')"),
        ("utils", ""),
    ],
)
def test_an_import_that_points_up_is_found(room: str, source: str) -> None:
    """Up, sideways, hidden in a function, for types only, by name: no way round."""
    assert len(architecture.layering(planted(**{room: source}))) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("net__tcp", "from potluck.errors import IoError"),
        ("net__tcp", "from . import frames"),
        ("backend__mesh", "from ..net import tcp\nfrom potluck.core.barrier import Barrier"),
        ("runtime__control", "import potluck.collective.ring, potluck.backend.mesh"),
        ("apps__cli", "from potluck import join"),
        ("torch", "from potluck.training.process_group import register"),
        ("testing__cluster", "from potluck.runtime import control"),
    ],
)
def test_an_import_that_points_down_is_welcome(room: str, source: str) -> None:
    """The layering rule forbids nothing that the plan allows."""
    assert architecture.layering(planted(**{room: source})) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core__health", "import threading"),
        ("core__health", "import time"),
        ("core__health", "from random import random"),
        ("core__health", "import socket"),
        ("core__topology", "import numpy as np"),
        ("collective__ring", "import os"),
        ("messages", "import queue"),
        ("training__elastic", "from concurrent.futures import ThreadPoolExecutor"),
        ("vocabulary", "import ssl"),
        ("backend__mesh", "import torch"),
        ("arrays__numpy", "import torch.nn"),
        ("runtime__control", "import asyncio"),
        ("net__frames", "import pickle"),
        ("apps__cli", "def late():\n    import marshal"),
        ("net__frames", "__import__('shelve')"),
    ],
)
def test_a_tool_in_the_wrong_layer_is_found(room: str, source: str) -> None:
    """Threads, clocks, sockets, arrays, torch, event loops and pickles stay where they belong."""
    assert len(architecture.banned_imports(planted(**{room: source}))) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("net__tcp", "import socket, threading, time"),
        ("collective__ring", "import numpy"),
        ("backend__engines__gloo", "import torch.distributed"),
        ("arrays__torch", "import torch"),
        ("torch", "import torch"),
        ("apps__dashboard", "import asyncio"),
    ],
)
def test_a_tool_in_its_own_layer_is_welcome(room: str, source: str) -> None:
    """The bans forbid nothing that the plan allows."""
    assert architecture.banned_imports(planted(**{room: source})) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "def f(text):\n    exec(text)",
        "compile('1', '', 'eval')",
        "numpy.load(file, allow_pickle=True)",
        "numpy.load(file, allow_pickle=flag)",
        "importlib.import_module(name)",
    ],
)
def test_text_that_becomes_code_is_found(source: str) -> None:
    """Neither eval nor a pickle nor a computed import slips in."""
    assert len(architecture.banned_calls(planted(net__frames=source))) == 1


def test_harmless_calls_are_welcome() -> None:
    """A regular expression may be compiled and a model may be put into eval mode."""
    source = "re.compile('a')\nmodel.eval()\nnumpy.load(file, allow_pickle=False)"
    assert architecture.banned_calls(planted(net__frames=source)) == []


def test_an_import_cycle_is_found() -> None:
    """A circle is named in full, also when one side imports for types only or in a function."""
    modules = planted(
        net__a="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from potluck.net import b",
        net__b="def late():\n    from potluck.net.c import thing",
        net__c="import potluck.net.a",
        net__d="import potluck.net.a",
    )
    (sentence,) = architecture.cycles(modules)
    assert {f"potluck.net.{name}" in sentence for name in "abc"} == {True}
    assert "potluck.net.d" not in sentence
    modules = planted(net__a="import potluck.net.b", net__b="import potluck.errors", errors="")
    assert architecture.cycles(modules) == []


def test_a_file_over_the_budget_is_found() -> None:
    """301 lines need a reason, 401 have none, and a reason without need is an error."""
    longer = planted(net__frames="x = 1\n" * 800)
    assert len(architecture.file_sizes(longer, {})) == 1
    assert architecture.file_sizes(longer, {"potluck.net.frames": "one table"}) == []
    assert len(architecture.file_sizes(longer, {"potluck.net.frames": ""})) == 1
    assert architecture.file_sizes(planted(net__frames="x = 1\n" * 299), {}) == []
    far_longer = planted(net__frames="x = 1\n" * 1300)
    assert len(architecture.file_sizes(far_longer, {"potluck.net.frames": "one table"})) == 1
    assert len(architecture.file_sizes(planted(errors=""), {"potluck.errors": "stale"})) == 1
    assert len(architecture.file_sizes({}, {"potluck.gone": "stale"})) == 1


def test_a_long_function_is_found() -> None:
    """Sixty lines of body pass, sixty-one do not; the docstring is free."""
    body = '    """One.\n\n    Two.\n    """\n' + "    x = 1\n" * 60
    assert architecture.functions(planted(net__a=f"def f():\n{body}")) == []
    assert len(architecture.functions(planted(net__a=f"def f():\n{body}    x = 2"))) == 1
    nested = "class A:\n    async def f(self):\n        def g():\n" + "            x = 1\n" * 61
    assert len(architecture.functions(planted(net__a=nested))) == 2  # g, and f around it


@pytest.mark.parametrize(
    ("signature", "violations"),
    [
        ("def f(a, b, c, d, e, f): ...", 0),
        ("def f(a, b, c, d, e, f, g): ...", 1),
        ("def f(a, /, b, c, d, e, f, g): ...", 1),
        ("def f(a, *, b, c, d, e, f, g): ...", 0),
        ("class A:\n    def f(self, a, b, c, d, e, f): ...", 0),
        ("class A:\n    def f(self, a, b, c, d, e, f, g): ...", 1),
        ("class A:\n    @staticmethod\n    def f(a, b, c, d, e, f, g): ...", 1),
    ],
)
def test_a_wide_signature_is_found(signature: str, violations: int) -> None:
    """Six positional parameters are enough; self is not counted, keywords are free."""
    assert len(architecture.functions(planted(net__a=signature))) == violations


@pytest.mark.parametrize("text", ["", '"""."""', '"""Frames"""', "# Frames are bytes."])
def test_a_module_without_a_sentence_is_found(text: str) -> None:
    """A module opens with at least one sentence."""
    assert len(architecture.docstrings(architecture.parse({"potluck.net": text}))) == 1


def test_the_document_and_the_rules_agree() -> None:
    """The table in docs/architecture.md is the table the checker uses."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", text, flags=re.MULTILINE)
    written = {layer: set(re.findall(r"`(\w+)`", allowed)) for layer, allowed in rows}
    ruled = {layer: set(allowed) - {layer} for layer, allowed in architecture.MAY_IMPORT.items()}
    assert written == ruled
