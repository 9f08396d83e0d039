"""The end of a view: everything that runs on its mesh ends at once, and the ports go on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from potluck import DistributedContext
from potluck.backend.base import NOTICES
from potluck.backend.view import ViewBackend
from potluck.errors import (
    Aborted,
    BackendUnavailable,
    ChannelClosed,
    DistributedError,
    PeerLost,
)
from potluck.messages import Lane
from potluck.net.secure_socket import OpeningSocket
from support.forks import in_child
from support.threads import PATIENCE, Background, eventually, together
from support.views import (
    Neighbourhood,
    neighbourhood,
    soon,
    sums,
    view_of,
)

SUPERSEDED = Aborted("view 1 is over")


@pytest.fixture(params=["tls", "clear"])
def here(request: pytest.FixtureRequest) -> Iterator[Neighbourhood]:
    """A network, encrypted or not."""
    with neighbourhood(encrypted=request.param == "tls") as here:
        yield here


@pytest.fixture
def secure() -> Iterator[Neighbourhood]:
    """A network, encrypted."""
    with neighbourhood() as here:
        yield here


def is_waited_for(backend: ViewBackend) -> bool:
    """Whether rank 0 has told this one that it is in an operation and waits."""
    backend.progress(0)
    return backend.has_message(0, group=NOTICES)


def test_abort_ends_an_all_reduce_in_the_middle(here: Neighbourhood) -> None:
    """With the very error given, on a rank whose partner is in no operation at all."""
    ports = [here.machine(), here.machine(), here.machine()]
    backends = here.open(view_of(*ports), ports)
    assert sums(backends) == [6.0] * 3  # their streams are open
    context = DistributedContext.with_metrics(backends[0])
    values = np.ones(1 << 22, np.float32)
    reducing = Background(lambda: context.all_reduce(values))
    opening = Background(lambda: backends[0].open_stream(2, "soup", soon(), lambda: None))
    messaging = Background(lambda: backends[0].recv(bytearray(4), 2))
    gathering = Background(backends[0].barrier)
    eventually(lambda: is_waited_for(backends[1]) or is_waited_for(backends[2]))
    begin = time.monotonic()
    backends[0].abort(SUPERSEDED)
    for waiting in (reducing, opening, messaging, gathering):
        with pytest.raises(Aborted, match="view 1 is over"):
            waiting.result()
    assert time.monotonic() - begin < 5
    with pytest.raises(Aborted, match="view 1 is over"):
        context.all_reduce(values)
    with pytest.raises(Aborted, match="view 1 is over"):
        backends[0].send(b"more", 1)
    assert isinstance(backends[0].loss_of(1), Aborted)


def test_abort_ends_work_that_was_started(secure: Neighbourhood) -> None:
    """Also what nobody waits for yet, and what is still behind it."""
    ports = [secure.machine(), secure.machine()]
    left, _ = secure.open(view_of(*ports), ports)
    context = DistributedContext.with_metrics(left)
    started = [context.all_reduce(np.ones(1 << 20), async_op=True) for _ in range(3)]
    left.abort(SUPERSEDED)
    for work in started:
        with pytest.raises(Aborted, match="view 1 is over"):
            work.wait(PATIENCE)
    left.close()


def test_abort_ends_a_stream_that_is_being_dialled(secure: Neighbourhood) -> None:
    """The other side has the hello and does not answer."""
    ann, ben = secure.machine(), secure.machine()
    backends = secure.open(view_of(ann, ben), [ann, ben])
    asked = threading.Event()
    with contextlib.ExitStack() as held:

        def keep(sock: OpeningSocket, _: Lane) -> None:
            held.callback(sock.close)
            asked.set()

        ann.serve(backends[0].view.session, keep)
        opening = Background(lambda: backends[1].open_stream(0, "soup", soon(), lambda: None))
        assert asked.wait(PATIENCE)
        backends[1].abort(SUPERSEDED)
        with pytest.raises(Aborted, match="view 1 is over"):
            opening.result(2)


def test_the_others_are_told_that_a_rank_has_left(secure: Neighbourhood) -> None:
    """They lose it at once, whether it closed or was aborted; the first ending counts."""
    ports = [secure.machine() for _ in range(3)]
    ann, ben, cleo = secure.open(view_of(*ports), ports)
    waiting = Background(lambda: cleo.recv(bytearray(4), 0))
    ann.abort(SUPERSEDED)
    ann.abort(ChannelClosed("too late"))
    ann.close()
    with pytest.raises(PeerLost, match="Rank 0"):
        waiting.result()
    with pytest.raises(Aborted, match="view 1 is over"):
        ann.barrier()
    ben.close()
    ben.abort(SUPERSEDED)
    with pytest.raises(ChannelClosed, match="has closed"):
        ben.barrier()
    with pytest.raises(PeerLost):
        cleo.recv(bytearray(4), 1)


def test_one_view_ends_while_the_next_is_being_opened(secure: Neighbourhood) -> None:
    """On the same ports, by other threads."""
    ports = [secure.machine() for _ in range(3)]
    for epoch in range(1, 5):
        before = secure.open(view_of(*ports, epoch=epoch), ports)
        reducing = [
            Background(lambda one=one: sums([one]))  # type: ignore[misc]
            for one in before[:2]
        ]
        after, *_ = together(
            lambda epoch=epoch: secure.open(view_of(*ports, epoch=epoch + 10), ports),  # type: ignore[misc]
            *(lambda one=one: one.abort(SUPERSEDED) or [] for one in before),
        )
        for waiting in reducing:
            with pytest.raises(DistributedError):
                waiting.result()
        assert sums(after) == [6.0] * 3
        for backend in (*before, *after):
            backend.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # that is the case here
def test_a_forked_child_is_no_member(secure: Neighbourhood) -> None:
    """It can use nothing, may close everything, and its parent notices none of it."""
    ports = [secure.machine(), secure.machine()]
    backends = secure.open(view_of(*ports), ports)
    assert sums(backends) == [3.0] * 2

    def misuse() -> str:
        try:
            backends[0].send(b"from a child", 1)
        except BackendUnavailable as error:
            for backend, port in zip(backends, ports, strict=True):
                backend.abort(SUPERSEDED)
                backend.close()
                port.close()
            return str(error)
        return "it works"

    assert "belongs to the parent process" in in_child(misuse)
    assert sums(backends) == [3.0] * 2
    assert sums(secure.open(view_of(*ports, epoch=2), ports)) == [3.0] * 2
