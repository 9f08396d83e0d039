"""A socket that speaks TLS while a connection opens: it waits as long as it was told, no longer."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest

from potluck.errors import PeerLost
from potluck.identity.namespace import NetworkNamespace, SecurityWarning
from potluck.net.secure_socket import NOBODY, SecureSocket, Security
from potluck.net.tls import AnotherNamespace, TlsChannel
from support.doors import TimedSocket
from support.threads import PATIENCE, Background, eventually
from support.tls_pair import CALLED, CALLER, converse, open_pair, pair


def test_what_comes_too_late_does_not_prolong_a_handshake() -> None:
    """A side that sends a byte now and then has as much time as one that sends none."""
    client, _ = pair()
    ours, theirs = socket.socketpair()
    with contextlib.closing(SecureSocket(ours, client)) as sock, theirs:
        theirs.sendall(b"\x16")
        with pytest.raises(TimeoutError):
            sock.handshake(time.monotonic())


def test_what_comes_too_late_does_not_prolong_the_end_of_tls() -> None:
    """Somebody that talks on instead of ending TLS is left."""
    client, server = open_pair()
    ours, theirs = socket.socketpair()
    with contextlib.closing(SecureSocket(ours, client)) as sock, theirs:
        server.write(b"and another thing")
        theirs.sendall(server.outgoing())
        with pytest.raises(TimeoutError):
            sock.release(time.monotonic())


def test_every_wait_of_a_handshake_has_only_the_time_that_is_left() -> None:
    """Or a side that says a little and stops would be given as long again."""
    client, server = pair()
    ours, theirs = socket.socketpair()
    timed = TimedSocket(fileno=ours.detach())
    with contextlib.closing(SecureSocket(timed, client)) as sock, theirs:
        theirs.settimeout(PATIENCE)
        shaking = Background(lambda: sock.handshake(time.monotonic() + PATIENCE))
        server.receive(theirs.recv(1 << 16))
        answer = server.outgoing()
        theirs.sendall(answer[:10])
        eventually(lambda: len(timed.waits) == 2)
        theirs.sendall(answer[10:])
        shaking.result()
    assert timed.waits[1] < timed.waits[0]


def test_an_end_of_the_connection_is_not_an_end_of_what_is_said() -> None:
    """Unless TLS was ended first: another could have cut it off."""
    for is_ended in (True, False):
        client, server = open_pair()
        ours, theirs = socket.socketpair()
        with contextlib.closing(SecureSocket(ours, client)) as sock:
            sock.settimeout(30)
            server.write(b"last words")
            if is_ended:
                server.unwrap()
            theirs.sendall(server.outgoing())
            theirs.close()
            assert sock.recv(4) == b"last"
            assert sock.recv(100) == b" words"
            with contextlib.nullcontext() if is_ended else pytest.raises(PeerLost):
                assert sock.recv(100) == b""


# --------------------------------------------------------------------------------------------------
# How connections open: under the secret that holds, or known to be under an earlier one.

OLD = NetworkNamespace("lab", b"l" * 32, home=Path("/nowhere"))
NEW = OLD.rotated(b"n" * 32)
NEWEST = NEW.rotated(b"w" * 32)


def meet(
    caller: Security, called: Security, secret: bytes | None = None
) -> tuple[TlsChannel, TlsChannel, object, object]:
    """Both ends after the handshake, and the errors they ended with."""
    client = caller.dial_channel("lion", CALLED.id, secret=secret)
    server = called.answer_channel("otter")
    assert client is not None
    assert server is not None
    return client, server, *converse(client, server)


@pytest.mark.parametrize("theirs", [OLD, NEW, NEWEST])
def test_a_caller_is_answered_under_the_secret_it_has(theirs: NetworkNamespace) -> None:
    """Both sides know which one that was, and who the other is."""
    caller, called = Security(theirs, CALLER), Security(NEWEST, CALLED)
    client, server, *errors = meet(caller, called)
    assert errors == [None, None]
    assert client.tag == server.tag == theirs.discovery_tag
    assert (client.peer, server.peer) == (CALLED.id, CALLER.id)
    assert caller.is_current(client.tag)
    assert called.is_current(server.tag) is (theirs is NEWEST)


def test_a_later_secret_than_ours_is_another_namespace_to_us() -> None:
    """Until the caller tries one that we have."""
    caller, called = Security(NEWEST, CALLER), Security(OLD, CALLED)
    *_, error, _ = meet(caller, called)
    assert isinstance(error, AnotherNamespace)
    client, server, *errors = meet(caller, called, NEW.secret)
    assert isinstance(errors[0], AnotherNamespace)
    client, server, *errors = meet(caller, called, OLD.secret)
    assert errors == [None, None]
    assert called.is_current(server.tag)
    assert not caller.is_current(client.tag)


def test_a_tag_without_its_secret_opens_nothing() -> None:
    """Tags are no secret: whoever names one still has to prove the secret behind it."""
    stranger = Security(NetworkNamespace("lab", b"x" * 32, home=Path("/nowhere")), CALLER)
    client = stranger.dial_channel("lion")
    assert client is not None
    context = client._tls.context
    for tag in (NEW.discovery_tag, OLD.discovery_tag, "nobody", "a" * 63):
        context.tag = tag  # type: ignore[attr-defined]
        lying = TlsChannel(context, server_side=False)
        server = Security(NEW, CALLED).answer_channel("otter")
        assert server is not None
        error, _ = converse(lying, server)
        assert isinstance(error, AnotherNamespace)
        assert not server.handshake_done


def test_a_new_secret_holds_from_the_next_connection_on() -> None:
    """The one that was in force becomes an earlier one; what is open stays open."""
    called = Security(OLD, CALLED)
    _, before, *_ = meet(Security(OLD, CALLER), called)
    assert called.is_current(before.tag)
    called.renew(NEW)
    assert not called.is_current(before.tag)
    _, after, *errors = meet(Security(NEW, CALLER), called)
    assert errors == [None, None]
    assert called.is_current(after.tag)


def test_in_clear_nobody_is_anybody() -> None:
    """No channels, no ids, no keys."""
    with pytest.warns(SecurityWarning):
        security = Security(NetworkNamespace.insecure())
    assert security.me == NOBODY
    assert security.answer_channel("otter") is None
    assert security.dial_channel("lion") is None
