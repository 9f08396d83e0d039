"""Forked children: they let go of every descriptor of ours, and the parent does not notice.

The forks happen in interpreters of their own, so that no child of the test runner runs on.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from potluck import _process
from potluck._process import Closing
from support.interpreter import ask
from support.reception import last_words

TESTS = Path(__file__).parents[0]

# What every script below begins with: something of each sort that has descriptors.
PROLOGUE = """
import gc, json, sys, threading, time
from potluck import _process as descriptors
from potluck.net import tcp as pollers, tcp
from potluck.net.listener import Acceptor
from potluck.net.addresses import Address
from support.doors import read, socket_pair, wait_for_event
from support.forks import in_child, open_files

ordinary = open_files()
left, right = map(tcp.TcpStream, socket_pair())
pollers = [pollers.EpollPoller(), pollers.SelectorPoller()]
for poller in pollers:
    poller.register(left, 7)
    poller.wait(0)
acceptor = Acceptor(tcp.listen("127.0.0.1", 0), lambda sock, _: sock.close())
silent = tcp.connect(Address("127.0.0.1", acceptor.port), time.monotonic() + 30)
while not acceptor._callers:
    time.sleep(0.001)
ours = open_files() - ordinary
"""
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def run(script: str, tmp_path: Path) -> Any:
    """Run a script after the prologue; what it printed last."""
    return ask(PROLOGUE + textwrap.dedent(script), cwd=tmp_path, path=TESTS)


@linux
def test_a_child_has_none_of_our_descriptors(tmp_path: Path) -> None:
    """Streams, listeners, callers, pollers and their wake-up lines are closed; the rest is not."""
    kept, foreign = run(
        """
        kept = in_child(lambda: sorted(ours & open_files()))
        foreign = in_child(lambda: ordinary <= open_files())
        print(json.dumps([kept, foreign]))
        """,
        tmp_path,
    )
    assert kept == []
    assert foreign is True


@linux
def test_a_childs_child_has_none_either(tmp_path: Path) -> None:
    """A data loader may start helpers of its own."""
    assert (
        run(
            "print(json.dumps(in_child(lambda: in_child(lambda: sorted(ours & open_files())))))",
            tmp_path,
        )
        == []
    )


@linux
def test_a_program_started_by_us_has_none(tmp_path: Path) -> None:
    """Also when it is started with all inheritable descriptors."""
    script = """
        import subprocess
        source = "import json; from support.forks import open_files as f; print(json.dumps([*f()]))"
        child = subprocess.run([sys.executable, "-c", source], close_fds=False, capture_output=True)
        print(json.dumps(sorted(ours & set(json.loads(child.stdout)))))
    """
    assert run(script, tmp_path) == []


@linux
def test_the_parent_does_not_notice(tmp_path: Path) -> None:
    """Its streams work, its pollers still watch them, and its door is open."""
    events, data, answered = run(
        """
        in_child(lambda: None)
        right.sendmsg([b"hello"])
        events = [wait_for_event(poller) for poller in pollers]
        data = read(left, 5).decode()
        silent.sendall(b"x" * 36)  # no hello: the acceptor hangs up
        silent.settimeout(30)
        try:
            answered = silent.recv(1) == b""
        except ConnectionResetError:
            answered = True
        acceptor.close()
        print(json.dumps([events, data, answered]))
        """,
        tmp_path,
    )
    assert events == [[[7, True, False]]] * 2
    assert data == "hello"
    assert answered is True


@linux
def test_the_parent_may_wait_while_the_child_lets_go(tmp_path: Path) -> None:
    """A thread of the parent sleeps in the poller; the child's closing does not wake or end it."""
    events = run(
        """
        results = []
        waiting = threading.Thread(target=lambda: results.append(wait_for_event(pollers[0])))
        waiting.start()
        in_child(lambda: None)
        assert not results
        right.sendmsg([b"x"])
        waiting.join(30)
        acceptor.close()
        print(json.dumps(results))
        """,
        tmp_path,
    )
    assert events == [[[7, True, False]]]


@linux
def test_a_lock_held_at_the_fork_holds_up_nobody(tmp_path: Path) -> None:
    """Another thread may have had it; in the child it will never be released."""
    script = """
        with pollers[1]._lock:
            kept = in_child(lambda: sorted(ours & open_files()))
        acceptor.close()
        print(json.dumps(kept))
    """
    assert run(script, tmp_path) == []


@linux
def test_listeners_are_told_in_the_child_only(tmp_path: Path) -> None:
    """After the descriptors are closed, also when one of them cannot be; not the ones that died."""
    told, parent = run(
        """
        class Stuck:
            def close(self):
                raise OSError("cannot be closed")

        class Aware:
            told = None
            def become_forked(self):
                self.told = sorted(ours & open_files())

        stuck, owner, gone = Stuck(), Aware(), Aware()
        descriptors.track(stuck)
        descriptors.on_fork(owner)
        descriptors.on_fork(gone)
        del gone
        gc.collect()
        told = in_child(lambda: owner.told)
        acceptor.close()
        print(json.dumps([told, owner.told]))
        """,
        tmp_path,
    )
    assert told == []
    assert parent is None


def test_what_was_collected_is_forgotten() -> None:
    """The list does not grow with every connection that there has ever been."""

    class Owner:
        def close(self) -> None:
            pass

        def become_forked(self) -> None:
            pass

    gc.collect()
    before = len(_process._owned), len(_process._fork_aware)
    owners = [Owner() for _ in range(100)]
    for owner in owners:
        _process.track(owner)
        _process.on_fork(owner)
    assert len(_process._owned) == before[0] + 100
    del owner, owners
    gc.collect()
    assert (len(_process._owned), len(_process._fork_aware)) == before


# -- the death of the parent -----------------------------------------------------------------------

_PARENT = """
import os, signal, sys, time
from potluck.net import tcp
from potluck.net.addresses import Address

stream = tcp.TcpStream(tcp.connect(Address("127.0.0.1", int(sys.argv[1])), time.monotonic() + 30))
child = os.fork()
if not child:
    sys.stdin.read()  # until the test is over
    os._exit(0)
print(child, flush=True)
stream.sendmsg([b"here"])
sys.stdout.close()
signal.pause()
"""


@pytest.fixture
def parent() -> Iterator[tuple[socket.socket, subprocess.Popen[str], int]]:
    """A process with a connection to us and a forked child that outlives it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        process = subprocess.Popen(
            [sys.executable, "-c", _PARENT, str(listener.getsockname()[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            sock, _ = listener.accept()
            sock.settimeout(30)
            assert process.stdout is not None
            with sock:
                yield sock, process, int(process.stdout.readline())
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the child as well
            with process:
                pass


def test_a_child_does_not_keep_the_connections_of_a_dead_parent(
    parent: tuple[socket.socket, subprocess.Popen[str], int],
) -> None:
    """The peer learns at once that the parent was killed, although the child lives on."""
    sock, process, child = parent
    assert sock.recv(4) == b"here"
    process.kill()
    assert last_words(sock) == b""
    assert psutil.Process(child).is_running()


# --------------------------------------------------------------------------------------------------
# Closing: the end of a block closes, however it comes.


class Door(Closing):
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        """Count."""
        self.closed += 1


def test_the_end_of_a_block_closes() -> None:
    """What is entered is the thing itself."""
    door = Door()
    with door as entered:
        assert entered is door
        assert door.closed == 0
    assert door.closed == 1


def test_an_error_closes_too_and_is_not_swallowed() -> None:
    """The caller hears of it."""
    door = Door()
    with pytest.raises(ZeroDivisionError), door:
        raise ZeroDivisionError
    assert door.closed == 1


def test_what_cannot_be_closed_says_so() -> None:
    """A class that forgot its ``close`` is found at its first use."""
    with pytest.raises(NotImplementedError), Closing():
        pass
