"""The tree of errors: what it promises in its docstring, and what every error carries."""

from __future__ import annotations

import builtins
import copy
import errno
import importlib
import os
import pickle
import pkgutil
import re
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import potluck
from potluck import RpcError, errors
from potluck._version import THIS_BUILD, Build, NewerFile, VersionMismatch
from potluck.errors import (
    Aborted,
    BackendUnavailable,
    ChannelClosed,
    CollectiveMismatch,
    Disconnected,
    DistributedError,
    HandshakeRefused,
    InvalidRank,
    InvalidWorldSize,
    IoError,
    LeftOut,
    MalformedFrame,
    NoConnection,
    NoQuorum,
    PeerLost,
    SelfSend,
    SizeMismatch,
    Timeout,
    UnsupportedOperation,
    ViewChanged,
    from_os_error,
)

FACTS = {
    "rank": 3,
    "node": "otter",
    "host": "192.168.1.10",
    "expected": 4,
    "got": 10,
    "cause": "cable pulled",
    "hint": "Plug it in.",
}

EVERY_ERROR: list[Callable[[], DistributedError]] = [
    lambda: DistributedError("The link broke", **FACTS),
    lambda: InvalidWorldSize(1, minimum=2, hint="Start more."),
    lambda: InvalidRank(5, 2, hint="Count from 0."),
    lambda: SelfSend(3),
    lambda: SizeMismatch(4, 10, rank=3),
    lambda: CollectiveMismatch("One reduces, one gathers", **FACTS),
    lambda: UnsupportedOperation("This backend cannot do that", **FACTS),
    lambda: Aborted("The lid was closed", **FACTS),
    lambda: LeftOut("This process was left out of view 4", **FACTS),
    lambda: NoQuorum("Waited 5 s", seconds=5, missing=[1], **FACTS),
    lambda: ViewChanged("A machine has come", **FACTS),
    lambda: BackendUnavailable("It is closed", **FACTS),
    lambda: Timeout("Nobody came", seconds=0.5, missing=[1, 2], **FACTS),
    lambda: IoError("The disk is full", **FACTS),
    lambda: MalformedFrame("Garbage", **FACTS),
    lambda: Disconnected("Not connected", **FACTS),
    lambda: ChannelClosed("We closed it", **FACTS),
    lambda: NoConnection("Nobody there", **FACTS),
    lambda: PeerLost("Rank 3 is gone", **FACTS),
    lambda: HandshakeRefused("They said no", **FACTS),
    lambda: VersionMismatch("desk", THIS_BUILD, "attic", Build("9.8.7", 9, 8)),
    lambda: NewerFile("a/file", 2, 1, "9.8.7"),
]


class Drawn(NamedTuple):
    """One line of the tree in the docstring."""

    name: str
    parent: str | None
    builtin: str | None
    recoverable: bool


def drawn_tree() -> Iterator[Drawn]:
    """Read the picture: the depth of a name is the column in which it stands."""
    assert errors.__doc__ is not None
    above: list[tuple[int, str]] = []
    for line in errors.__doc__.partition("::\n")[2].splitlines():
        match = re.search(r"[A-Z]\w+", line)
        if match is None:
            continue
        while above and above[-1][0] >= match.start():
            above.pop()
        builtin = re.search(r"\((\w+)\)", line)
        yield Drawn(
            match[0],
            above[-1][1] if above else None,
            builtin[1] if builtin else None,
            line.rstrip().endswith("recoverable"),
        )
        above.append((match.start(), match[0]))


def real_tree(cls: type[DistributedError], parent: str | None = None) -> dict[str, str | None]:
    """Every class of the module by name, with its parent."""
    tree = {cls.__name__: parent}
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            tree |= real_tree(child, cls.__name__)
    return tree


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    """The picture is the documentation; it names every class and hides none."""
    assert {line.name: line.parent for line in drawn_tree()} == real_tree(DistributedError)


def test_the_tree_is_the_public_interface() -> None:
    """Nobody has to import an error that the picture does not show."""
    assert sorted(line.name for line in drawn_tree()) == sorted(errors.__all__)


@pytest.mark.parametrize("line", list(drawn_tree()), ids=lambda line: line.name)
def test_every_class_is_what_its_line_says(line: Drawn) -> None:
    """It derives from the builtin a caller would catch, and is recoverable only if marked so."""
    cls = getattr(errors, line.name)
    builtin = getattr(builtins, line.builtin or "Exception")
    assert issubclass(cls, builtin)
    assert cls.recoverable is line.recoverable
    assert cls.__doc__


def test_errors_of_the_parts_stand_in_the_same_tree_and_are_listed() -> None:
    """Whoever catches DistributedError catches them; the page of the tree says where they are."""
    for module in pkgutil.walk_packages(potluck.__path__, "potluck."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert errors.__doc__ is not None
    listed = " ".join(errors.__doc__.partition("::\n")[0].split())
    for cls in below(DistributedError):
        if cls.__module__ not in {errors.__name__, RpcError.__module__} and is_ours(cls):
            home = cls.__module__.removeprefix("potluck.")
            assert re.search(rf"``{cls.__name__}``[^(]*\({re.escape(home)}\)", listed), cls


def below(cls: type[DistributedError]) -> Iterator[type[DistributedError]]:
    """Every class that derives from one."""
    for child in cls.__subclasses__():
        yield child
        yield from below(child)


def is_ours(cls: type) -> bool:
    """Whether it is part of the library: tests have errors of their own."""
    return cls.__module__.startswith("potluck.")


def test_no_public_name_raises_an_error_outside_the_tree() -> None:
    """Every public exception is in it."""
    public = [getattr(potluck, name) for name in potluck.__all__]
    found = [each for each in public if isinstance(each, type) and issubclass(each, Exception)]
    outside = {each for each in found if not issubclass(each, DistributedError)}
    assert outside == {potluck.SecurityWarning}


def test_every_class_has_an_example_here() -> None:
    """The tests below miss no class."""
    assert {type(make()).__name__ for make in EVERY_ERROR} >= set(errors.__all__)


@pytest.mark.parametrize("make", EVERY_ERROR, ids=lambda make: type(make()).__name__)
def test_an_error_survives_the_trip_between_processes(make: Callable[[], DistributedError]) -> None:
    """Type, text and every field arrive, with pickles of all ages and with copies."""
    error = make()
    error.add_note("while training")
    pickles = [pickle.dumps(error, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    copies = [pickle.loads(data) for data in pickles]  # noqa: S301 - written two lines above
    for twin in [*copies, copy.copy(error), copy.deepcopy(error)]:
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
        assert twin.args == error.args
        assert twin.recoverable is error.recoverable


@pytest.mark.parametrize("field", FACTS)
def test_a_fact_is_a_field(field: str) -> None:
    """What is not given is None."""
    assert getattr(DistributedError("x", **{field: FACTS[field]}), field) == FACTS[field]
    assert getattr(DistributedError("x"), field) is None


def test_an_unknown_field_is_refused() -> None:
    """A misspelt fact would otherwise be lost without a word."""
    with pytest.raises(TypeError, match=r"PeerLost has no field colour, rang"):
        PeerLost("Rank 3 is gone", rang=3, colour="red")


texts = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1)


@given(message=texts, cause=st.none() | texts, hint=st.none() | texts)
def test_the_text_says_what_happened_then_why_then_what_to_do(
    message: str, cause: str | None, hint: str | None
) -> None:
    """Each part is there, in this order, and a sentence ends before the hint begins."""
    text = str(DistributedError(message, cause=cause, hint=hint))
    what = message if cause is None else f"{message}: {cause}"
    assert text.startswith(what)
    rest = text[len(what) :]
    assert rest == ("" if hint is None else f" {hint}" if what[-1] in ".!?" else f". {hint}")


def test_a_builtin_handler_catches_ours() -> None:
    """Code written for sockets and futures keeps working."""
    for builtin, error in (
        (ValueError, SizeMismatch(4, 10)),
        (TimeoutError, Timeout("Late", seconds=1)),
        (ConnectionError, PeerLost("Gone")),
        (OSError, PeerLost("Gone")),
    ):
        with pytest.raises(builtin):
            raise error


def test_facts_of_their_own() -> None:
    """What a handler computes with is a number, not a word in a sentence."""
    assert InvalidWorldSize(1, minimum=2).world_size == 1
    assert InvalidWorldSize(1, minimum=2).expected == 2
    assert InvalidRank(5, 2).world_size == 2
    assert InvalidRank(5, 2).rank == 5
    assert SelfSend(3).rank == 3
    late = Timeout("Late", seconds=0.5, missing=iter([1, 2]))
    assert (late.seconds, late.missing) == (0.5, (1, 2))
    assert "The message from rank 1 has 10 bytes" in str(SizeMismatch(4, 10, rank=1))
    assert "A message has 10 bytes" in str(SizeMismatch(4, 10))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ECONNREFUSED, NoConnection),
        (errno.EHOSTUNREACH, NoConnection),
        (errno.ENETUNREACH, NoConnection),
        (errno.ETIMEDOUT, NoConnection),
        (errno.ECONNRESET, PeerLost),
        (errno.EPIPE, PeerLost),
        (errno.ECONNABORTED, PeerLost),
        (errno.EADDRINUSE, IoError),
        (errno.EADDRNOTAVAIL, IoError),
        (errno.EACCES, IoError),
        (errno.EMFILE, IoError),
        (errno.ENOSPC, IoError),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value.__name__,
)
def test_errors_of_the_system_become_ours(code: int, kind: type[DistributedError]) -> None:
    """What may work later in the same process is recoverable: peers and networks come back."""
    error = from_os_error("Dialling failed", OSError(code, os.strerror(code)), rank=2)
    assert type(error) is kind
    assert error.recoverable is (kind is not IoError)
    assert error.cause == os.strerror(code)
    assert error.rank == 2
    assert error.hint == errors._HINTS.get(code)


def test_the_action_and_the_systems_words_are_both_told() -> None:
    """The reader learns what was tried, what the system said, and what to do."""
    error = from_os_error("Rank 0 could not listen", OSError(errno.EADDRINUSE, "in use"))
    assert str(error) == (
        "Rank 0 could not listen: in use. "
        "Another process uses this port; stop it or choose another port."
    )


def test_a_given_hint_replaces_the_general_one() -> None:
    """Whoever catches the error may know better."""
    assert from_os_error("x", OSError(errno.EMFILE, "y"), hint="Close some.").hint == "Close some."


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError("no number"), "no number"),
        (TimeoutError("timed out"), "timed out"),
        (OSError(errno.EPIPE, ""), os.strerror(errno.EPIPE)),
    ],
)
def test_a_cause_is_found_in_odd_errors_too(error: OSError, cause: str) -> None:
    """Sockets raise errors without a number, and numbers without words."""
    assert from_os_error("x", error).cause == cause


def test_a_name_that_nobody_knows_is_no_connection() -> None:
    """Its error numbers mean something else than those of the system."""
    error = from_os_error("x", socket.gaierror(errno.ENOEXEC, "unknown name"))
    assert type(error) is NoConnection
    assert error.cause == "unknown name"
    assert "spelling" in str(error)


def test_our_own_errors_pass_unchanged() -> None:
    """An error that is already ours is not wrapped twice."""
    lost = PeerLost("Rank 3 is gone")
    assert from_os_error("x", lost) is lost
