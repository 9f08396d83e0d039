"""The floor plan holds: imports point down, layers keep to their tools, everything stays small.

Each rule is also shown a planted violation, so that a rule that has gone blind is noticed.
"""

import re
from pathlib import Path

import pytest

from support import architecture
from support.architecture_debts import DEBTS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "potluck"

# Module -> why it is longer than 800 lines.  1,300 is the most.
LONG_FILES: dict[str, str] = {
    "potluck.cluster.connections": "control connections: which to dial, open, keep and close",
    "potluck.cluster.topology": "one map: its writers, its file, and the machine it is on",
    "potluck.cluster.views": "a view as calls see it, from its building to its end",
    "potluck.collective.collectives": "one class: every collective of the public interface",
    "potluck.doctor.checks": "one table of checks, each a short function",
    "potluck.membership.core": "what a member does with each message and with time",
    "potluck.membership.state": "what a member knows, and all that changes it",
    "potluck.membership.views": "proposing, accepting and installing views is one argument",
    "potluck.rpc.peer": "peers, their waiting calls and the endpoint they belong to use each other",
    "potluck.rpc.protocol": "frames, windows and fairness of one protocol",
    "potluck.schedule.planner": "one choice: what may be wished, what there is, what it costs",
    "potluck.testing.invariants": "all promises about membership and training",
    "potluck.torch.process_group": "one class: every operation that torch.distributed has",
    "potluck.training.checkpoint_files": "one file format: how it is written, checked and read",
    "potluck.training.elastic": "one step is one transaction: attempt, settling and end",
    "potluck.trust.pairing_protocol": "both sides of one protocol, which are read together",
}


def modules() -> dict[str, architecture.Module]:
    """Those of the package; parsed when a test asks for them."""
    return architecture.load(SOURCE)


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
    assert check(modules()) == []


def test_files_keep_to_the_size_budget() -> None:
    """No file is longer than it may be, and no excuse outlives its need."""
    assert architecture.file_sizes(modules(), LONG_FILES) == []


def test_the_whole_package_is_read() -> None:
    """The checkers see every file of the package, so silence means something."""
    files = list((ROOT / "src" / "potluck").rglob("*.py"))
    assert len(modules()) == len(files) > 5
    assert "potluck" in modules()
    assert modules()["potluck.backend"].is_package


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("schedule__ring", "import potluck.net.frames"),
        ("schedule__ring", "from potluck.metrics import registry"),
        ("metrics__registry", "from potluck.schedule.task import Task"),
        ("net__tcp", "from ..backend.base import Backend"),
        ("net__tcp", "def late():\n    from potluck.cluster import control"),
        ("membership__election", "from potluck.backend.mesh import MeshBackend"),
        ("backend__mesh", "from potluck.membership.election import ElectionManager"),
        ("backend__mesh", "from potluck.cluster.control import ControlThread"),
        ("cluster__control", "from potluck.rpc import agent"),
        ("cluster__control", "from potluck.training import elastic"),
        ("training__elastic", "from potluck.torch import hooks"),
        ("training__elastic", "from potluck.apps.cli import main"),
        ("errors", "from potluck.membership import election"),
        ("errors", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import potluck.net"),
        ("torch__work", "from potluck.testing import clock"),
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
        ("backend__mesh", "from ..net import tcp\nfrom potluck.trust.roster import Roster"),
        ("cluster__control", "import potluck.schedule.task, potluck.membership.core"),
        ("apps__cli", "from potluck import join"),
        ("torch__hooks", "from potluck.training.elastic import ElasticTrainer"),
        ("testing__cluster", "from potluck.cluster import control"),
    ],
)
def test_an_import_that_points_down_is_welcome(room: str, source: str) -> None:
    """The layering rule forbids nothing that the plan allows."""
    assert architecture.layering(planted(**{room: source})) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("membership__health", "import threading"),
        ("membership__health", "import time"),
        ("membership__health", "from random import random"),
        ("trust__roster", "import socket"),
        ("trust__roster", "import secrets"),
        ("rpc__protocol", "import selectors"),
        ("training__steps", "import os"),
        ("backend__barrier", "import threading"),
        ("membership__topology", "import numpy as np"),
        ("schedule__algorithms__ring", "import os"),
        ("wire_messages", "import queue"),
        ("training__elastic", "from concurrent.futures import ThreadPoolExecutor"),
        ("_types", "import ssl"),
        ("backend__mesh", "import torch"),
        ("training__elastic", "import torch"),
        ("arrays__numpy", "import torch.nn"),
        ("cluster__control", "import asyncio"),
        ("net__frames", "import pickle"),
        ("apps__cli", "def late():\n    import marshal"),
        ("training__checkpoint", "import fcntl"),
        ("net__frames", "__import__('shelve')"),
    ],
)
def test_a_tool_in_the_wrong_layer_is_found(room: str, source: str) -> None:
    """Threads, clocks, sockets, arrays, torch, event loops and pickles stay where they belong."""
    assert architecture.banned_imports(planted(**{room: source})) != []


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nif sys.platform == 'linux':\n    pass",
        "import os\nIS_POSIX = os.name == 'posix'",
        "import select\nHAS_EPOLL = hasattr(select, 'epoll')",
        "import os\nFLAGS = getattr(os, 'O_NOFOLLOW', 0)",
        "def late():\n    import signal\n    return getattr(signal, 'SIGHUP', None)",
    ],
)
def test_a_question_about_the_platform_is_found(source: str) -> None:
    """One module asks; it alone may."""
    assert len(architecture.platforms(planted(net__dial=source))) == 1
    assert architecture.platforms(planted(_platform=source)) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("net__tcp", "import socket, threading, time"),
        ("trust__pairing", "import socket, secrets"),
        ("schedule__algorithms__ring", "import numpy"),
        ("backend__adapters__gloo", "import torch.distributed"),
        ("arrays__torch", "import torch"),
        ("torch__work", "import torch"),
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
    """801 lines need a reason, 1,301 have none, and a reason without need is an error."""
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


@pytest.mark.parametrize("check", architecture.SHRINKING, ids=lambda check: str(check.__name__))
def test_a_rule_that_does_not_hold_everywhere_is_broken_nowhere_else(
    check: architecture.Check,
) -> None:
    """What is listed may stay; what is new is refused, and what is gone leaves the list."""
    assert check(modules()) == DEBTS[check.__name__]


def test_a_crowded_folder_is_found() -> None:
    """Twenty-five modules pass, one more does not; packages that only document are not counted."""
    crowd = {f"net__m{number}": "x = 1" for number in range(25)}
    assert architecture.folders(planted(**crowd)) == []
    assert len(architecture.folders(planted(**crowd, net__more="x = 1"))) == 1
    many = {f"p{folder}__m{number}": "" for folder in range(10) for number in range(20)}
    assert architecture.folders(planted(**many)) == ["potluck has 200 modules"]


def test_a_fragment_is_found() -> None:
    """A few lines that one neighbour imports belong to it; two importers make a module of them."""
    user = "from potluck.net import b"
    assert len(architecture.fragments(planted(net__a=user, net__b="x = 1"))) == 1
    assert architecture.fragments(planted(net__a=user, net__c=user, net__b="x = 1")) == []
    assert architecture.fragments(planted(rpc__a=user, net__b="x = 1")) == []
    assert architecture.fragments(planted(net__a=user, net__b="x = 1\n" * 200)) == []


def test_a_fragment_with_a_reason_is_none_while_it_needs_one() -> None:
    """The reason is for a small module that one neighbour imports, and for nothing else."""
    user = "from potluck.arrays import jax"
    assert architecture.fragments(planted(arrays__a=user, arrays__jax="x = 1")) == []
    assert architecture.fragments(planted(arrays__a=user, arrays__b=user, arrays__jax="")) == [
        "potluck.arrays.jax needs no excuse (any more)"
    ]


def test_a_class_name_that_exists_twice_is_found() -> None:
    """Two public classes of one name are one too many; private ones are nobody's business."""
    twice = planted(net__a="class Frame: ...", rpc__a="class Frame: ...")
    assert architecture.class_names(twice) == ["Frame is defined in net.a, rpc.a"]
    assert architecture.class_names(planted(net__a="class _A: ...", rpc__a="class _A: ...")) == []


def test_a_class_that_is_cut_is_found() -> None:
    """A base that exists for one class is part of it; two heirs, errors and protocols are not."""
    heir = "from potluck.net.a import Part\nclass Whole(Part): ..."
    (sentence,) = architecture.cut_classes(planted(net__a="class Part: ...", net__b=heir))
    assert sentence == "net.b.Whole is the only heir of net.a.Part"
    shared = planted(net__a="class Part: ...", net__b=heir, net__c="class Other(Part): ...")
    assert architecture.cut_classes(shared) == []
    assert architecture.cut_classes(planted(net__a="class Part(Exception): ...", net__b=heir)) == []
    assert architecture.cut_classes(planted(net__a="class Part(Protocol): ...", net__b=heir)) == []


def test_a_protocol_with_one_implementation_is_found() -> None:
    """One class has no need of it; a second one, or a fake for tests, gives it a reason."""
    protocol = "class Door(Protocol):\n    def open(self): ...\n    def close(self): ..."
    first = "class Real:\n    def open(self): ...\n    def close(self): ..."
    found = architecture.single_protocols(planted(net__a=protocol, net__b=first))
    assert found == ["net.a.Door has 1 implementations"]
    second = "class Other:\n    open = close = print"
    assert (
        architecture.single_protocols(planted(net__a=protocol, net__b=first, net__c=second)) == []
    )
    fake = "class Fake(Door): ..."
    assert (
        architecture.single_protocols(planted(net__a=protocol, net__b=first, testing__c=fake)) == []
    )


@pytest.mark.parametrize(
    "source",
    ["vars(x)['_a'] = 1", "y = x.__dict__['_a']", "y = getattr(x, 'inner', x)"],
)
def test_smuggled_state_is_found(source: str) -> None:
    """Through vars, __dict__ or a literal getattr; the objects of a framework are looked at so."""
    assert len(architecture.smuggled_state(planted(collective__group=source))) == 1
    assert architecture.smuggled_state(planted(arrays__torch=source)) == []


@pytest.mark.parametrize(
    "source",
    ["class A:\n    locals().update({'f': g})", "for name in NAMES:\n    setattr(A, name, g)"],
)
def test_a_generated_method_is_found(source: str) -> None:
    """Neither by the names of a class body nor from outside."""
    assert len(architecture.generated_methods(planted(cluster__cluster=source))) == 1
    inside = "def f(self):\n    setattr(self, 'x', 1)"
    assert architecture.generated_methods(planted(cluster__cluster=inside)) == []


def test_the_document_and_the_rules_agree() -> None:
    """The table in docs/internals/architecture.md is the table the checker uses."""
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", text, flags=re.MULTILINE)
    written = {layer: set(re.findall(r"`(\w+)`", allowed)) for layer, allowed in rows}
    ruled = {layer: set(allowed) - {layer} for layer, allowed in architecture.MAY_IMPORT.items()}
    assert written == ruled
