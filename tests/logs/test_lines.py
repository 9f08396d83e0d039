"""Lines: one event is one, whatever is in it."""

import json
import logging
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.logs.lines import HumanFormatter, JsonFormatter, escaped


def record(message: str, **fields: object) -> logging.LogRecord:
    """As a logger makes it."""
    made = logging.LogRecord("potluck.kitchen", logging.ERROR, __file__, 1, message, None, None)
    vars(made).update(fields)
    return made


def failed() -> logging.LogRecord:
    """With an error that has two lines."""
    made = record("it boiled over")
    try:
        msg = "too\nhot"
        raise ValueError(msg)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


@given(st.text())
def test_nothing_steers_a_terminal_or_begins_a_line(text: str) -> None:
    """Neither line breaks of any kind, nor escapes, nor marks that turn the way of writing."""
    line = HumanFormatter().format(record(text))
    assert line.isprintable()
    assert escaped(text).isprintable()
    assert JsonFormatter().format(record(text)).isprintable()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_json_says_exactly_what_was_said(text: str) -> None:
    """It has escapes of its own."""
    assert json.loads(JsonFormatter().format(record(text)))["message"] == text


@pytest.mark.parametrize("text", ["plain", "übermäßig", "5 ± 1 µs …", "日本"])
def test_what_can_be_read_stays(text: str) -> None:
    """Letters of all languages."""
    assert escaped(text) == text


def test_an_error_is_part_of_its_line() -> None:
    """For people what it says and where; for programs the whole traceback."""
    line = HumanFormatter().format(failed())
    assert re.search(r": ValueError: too\\nhot \(test_lines\.py:\d+ in failed\)$", line)
    facts = json.loads(JsonFormatter().format(failed()))
    assert "Traceback" in facts["exception"]
    assert "too\nhot" in facts["exception"]


def test_fields_are_numbers_or_short_texts() -> None:
    """Whatever somebody passes as extra."""
    facts = json.loads(JsonFormatter().format(record("x", rank=1, who=object, lost=None, rate=0.5)))
    assert (facts["rank"], facts["lost"], facts["rate"]) == (1, None, 0.5)
    assert facts["who"] == "<class 'object'>"
