"""Locks in forked children: nobody's, unless the thread that forked held them."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import potluck
from potluck._platform import call_in_children
from potluck._process import ForkSafeLock
from support.forks import in_child
from support.threads import PATIENCE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
lock = ForkSafeLock()
done: list[str] = []
call_in_children(lambda: done.append("begun anew"))


@contextmanager
def held_elsewhere() -> Iterator[None]:
    """Another thread has the lock."""
    taken, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            let_go.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(PATIENCE)
    try:
        yield
    finally:
        let_go.set()
        thread.join(PATIENCE)


def is_free() -> bool:
    """Whether this thread can take it now."""
    if not lock.acquire(blocking=False):
        return False
    lock.release()
    return True


def test_one_that_another_thread_held_is_free_in_a_child_and_stays_taken_here() -> None:
    """Its holder does not exist there."""
    with held_elsewhere():
        assert not is_free()
        assert in_child(is_free) is True
        assert not is_free()
    assert is_free()


def test_one_that_the_forking_thread_held_is_still_its_own_in_a_child() -> None:
    """Which gives it back at the end of its block, as the parent does."""

    def give_back() -> bool:
        lock.release()
        return is_free()

    with lock:
        assert in_child(give_back) is True


def test_who_has_it_may_take_it_again() -> None:
    """A signal's handler does, that interrupts its owner."""
    with lock, lock:
        assert is_free()


def test_what_shall_be_done_in_children_is_done_there_alone() -> None:
    """Before the child does anything else."""
    assert in_child(lambda: done) == ["begun anew"]
    assert not done


def test_no_module_keeps_a_lock_that_a_child_could_find_taken() -> None:
    """A lock of a whole module is one of these, or is renewed where it stands."""
    bare = re.compile(r"^(\w+)(?:: [^=]+)? = threading\.(?:R?Lock|Condition)\(", re.MULTILINE)
    found = {}
    for path in sorted(Path(potluck.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name in bare.findall(text):
            if not re.search(rf"^    global .*\b{name}\b", text, re.MULTILINE):
                found[str(path)] = name
    assert not found
