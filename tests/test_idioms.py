"""Refused idioms are found, and plain sentences are let through."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.idioms import REFUSED, idioms

SOURCE = Path(__file__).parent.parent / "src" / "potluck"

CLEAN = (
    *("apps", "arrays", "backend", "cluster", "collective", "compression", "discovery", "doctor"),
    *("identity", "membership", "metrics", "net", "rpc", "schedule", "testing", "torch", "trace"),
    *("training", "trust", "__init__", "__main__", "_decode", "_future", "_platform", "_process"),
    *("_time", "_types", "_values", "_version", "errors", "launch_env", "logs", "wire_messages"),
)
"""Packages, and modules, whose texts keep to plain English; a package that is cleaned is added."""

PLANTED = [
    "hello.py is no file.",
    "Give up after so many seconds.",
    "Whoever comes late joins the others.",
    "It belongs to somebody else.",
    "Nobody answers.",
    "The machine goes by another name.",
    "The others go on without it.",
    "attic said goodbye.",
]


@pytest.mark.parametrize("sentence", PLANTED)
def test_a_planted_idiom_is_found_once(sentence: str) -> None:
    """Also in capitals, and across the end of a line."""
    assert len(idioms(sentence)) == 1
    assert len(idioms(sentence.upper())) == 1
    assert len(idioms(sentence.replace(" ", "\n    "))) == 1


def test_every_refused_idiom_is_planted() -> None:
    """A pattern that matches nothing would refuse nothing."""
    for pattern, sentence in zip(REFUSED, PLANTED, strict=True):
        assert re.search(pattern, sentence, re.IGNORECASE), pattern


@pytest.mark.parametrize(
    "sentence",
    [
        "There is no file hello.py here.",
        "The machine is no longer in the group.",
        "Training continues without attic.",
        "What is going on here?",
        "`nobody` is the name of a check, and ``go on`` is code.",
    ],
)
def test_plain_sentences_pass(sentence: str) -> None:
    """Established English that shares words with an idiom is not refused."""
    assert idioms(sentence) == []


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Every sentence in the strings of a module, docstrings included, with its line.

    A single word is a name, such as that of a check.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "X" for each in node.values)
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if " " in text.strip():
            yield node.lineno, text


@pytest.mark.parametrize("name", CLEAN)
def test_the_texts_of_a_clean_package_have_no_idiom(name: str) -> None:
    """Errors, help, log lines and docstrings alike."""
    place = SOURCE / name
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    found = [
        f"{file.relative_to(SOURCE)}:{line}: {idiom}"
        for file in files
        for line, text in texts(file.read_text(encoding="utf-8"))
        for idiom in idioms(text)
    ]
    assert files
    assert found == []


def test_an_idiom_is_found_in_every_kind_of_string() -> None:
    """In docstrings, in f-strings with a value in the middle, and not in names."""
    source = '''
def f(path):
    """Whoever calls this waits."""
    raise ValueError(f"{path} is no {kind} here", "nobody")
'''
    assert [line for line, text in texts(source) if idioms(text)] == [3, 4]
