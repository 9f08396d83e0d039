"""Ports of machines with rosters: every opening agrees on who belongs, as all others do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.backend.port import NodePort
from potluck.backend.view import ViewBackend
from potluck.errors import HandshakeRefused
from potluck.messages import Control, ControlOpened
from potluck.net.addresses import Address
from potluck.net.identity import NodeIdentity
from potluck.net.secure_socket import OpeningSocket
from potluck.net.security import Security
from support.circles import change_secret, impostor
from support.homes import Home, pair
from support.threads import together
from support.views import peer_of, soon, sums, view_of

HELLO = Control(job="soup")


@contextlib.contextmanager
def port_of(home: Home) -> Iterator[NodePort]:
    """A process of a machine, which answers whoever opens a control lane."""
    identity = NodeIdentity.load_or_generate(home.path / "node_keypair")
    with NodePort(security=Security(home.namespace(), identity)) as port:

        def welcome(sock: OpeningSocket, _: Control) -> None:
            port.answer_control(sock, ControlOpened(job="soup"))
            sock.close()

        port.on_control(welcome)
        yield port


def call(one: NodePort, other: NodePort) -> None:
    """Open a control lane and close it again."""
    address = Address("127.0.0.1", other.port)
    one.dial_control(address, other.process.node, HELLO, soon())[0].close()


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Home, Home, Home]:
    """Two machines that were paired, and one with a stolen secret."""
    desk, laptop = Home(tmp_path, "desk"), Home(tmp_path, "laptop")
    pair(desk, laptop)
    return desk, laptop, impostor(tmp_path, desk)


def test_a_secret_alone_opens_no_lane(homes: tuple[Home, Home, Home]) -> None:
    """Whoever is on no roster is refused, and does not accept others either."""
    with contextlib.ExitStack() as stack:
        desk, laptop, thief = (stack.enter_context(port_of(home)) for home in homes)
        call(laptop, desk)
        for one, other in ((thief, desk), (desk, thief)):
            with pytest.raises(HandshakeRefused, match=r"not a member|another circle"):
                call(one, other)


@pytest.mark.parametrize("dials", ["who was away", "who has the secret"])
def test_who_was_away_while_the_secret_changed_gets_it(
    homes: tuple[Home, Home, Home], dials: str
) -> None:
    """In one call, whichever side dials; afterwards the two form a view."""
    desk_home, laptop_home, _ = homes
    change_secret(desk_home, laptop_home)
    assert desk_home.namespace().secret != laptop_home.namespace().secret
    with port_of(desk_home) as desk, port_of(laptop_home) as laptop:
        call(*((laptop, desk) if dials == "who was away" else (desk, laptop)))
        assert desk_home.namespace().secret == laptop_home.namespace().secret
        view, peers = view_of(desk, laptop), [peer_of(desk), peer_of(laptop)]
        backends = together(
            lambda: ViewBackend(desk, view, desk.process, peers, deadline=soon()),
            lambda: ViewBackend(laptop, view, laptop.process, peers, deadline=soon()),
        )
        with backends[0], backends[1]:
            assert sums(backends) == [3.0] * 2
