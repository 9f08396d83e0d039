"""Strangers at the ports of a group that works: refused, for a logged reason, without effect."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck import HandshakeRefused, NetworkNamespace, NodeIdentity
from potluck.net.opening import exchange_hello, hello_frame
from potluck.net.secure_socket import Security
from potluck.net.tls import Authority
from potluck.wire_messages import Join, OpenReply, OpenRequest, RankEndpoint
from support.ranks import Ranks
from support.threads import PATIENCE
from support.tls_pair import client_hello, stranger
from support.victims import LEAKED, Target, dial, hear, say, work

HELLOS = [
    Join(rank=1, world_size=3, peer=RankEndpoint(hosts=["127.0.0.1"], port=1, name="double")),
    *(OpenRequest(session=LEAKED, rank=rank, to=0) for rank in range(3)),
]
"""Everything that opened a connection of this group once; its rank 0 may be asked in vain."""


@pytest.fixture
def target(ranks: Ranks) -> Iterator[Target]:
    """Three ranks in the namespace of this machine; they work before, during and after."""
    target = Target(ranks.start(work, 3))
    assert len(target.ports) == 3
    target.assert_works_on()
    yield target
    target.assert_works_on()
    target.assert_unharmed()


def security(namespace: NetworkNamespace) -> Security:
    """Somebody with a key of his own who has the secret of a namespace."""
    return Security(namespace, NodeIdentity.ephemeral())


def soon() -> float:
    """A deadline that only something that hangs misses."""
    return time.monotonic() + PATIENCE


def answer_to(port: int, context: ssl.SSLContext, data: bytes) -> bytes:
    """What a rank answers inside TLS to somebody who speaks without waiting to be accepted."""
    with contextlib.suppress(OSError), context.wrap_socket(dial(port)) as tls:
        say(tls, data)
        return hear(tls)
    return b""


# --- the tools of a curious neighbour ---


def s_client(port: int, *options: str, cwd: Path) -> str:
    """What ``openssl s_client`` shows about a port of the group."""
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", *options]
    with subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.PIPE,  # kept open: it ends because it is hung up on
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        return process.stdout.read()


def write_own_certificate(file: Path) -> None:
    """Sign a certificate for oneself."""
    request = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=desk"]
    own = subprocess.run([*request, "-keyout", "-"], check=True, capture_output=True)
    file.write_bytes(own.stdout)


OPENSSL = {
    "no certificate": ([], "showed no certificate"),
    "self-signed": (["-cert", "own", "-key", "own"], "self-signed"),
    "TLS 1.2": (["-tls1_2"], "does not speak TLS 1.3"),
    "TLS 1.2 with a certificate": (
        ["-tls1_2", "-cert", "own", "-key", "own"],
        "does not speak TLS 1.3",
    ),
}


def needs(program: str) -> pytest.MarkDecorator:
    """For a test that drives a program which may be missing."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs the program {program}")


@needs("openssl")
@pytest.mark.parametrize("name", OPENSSL)
def test_openssl_is_refused(target: Target, tmp_path: Path, name: str) -> None:
    """Whatever certificate it shows or does not show, at every rank's port."""
    options, reason = OPENSSL[name]
    write_own_certificate(tmp_path / "own")
    for port in target.ports:
        shown = s_client(port, *options, cwd=tmp_path)
        assert "alert" in shown  # it is told, in the words of TLS
    target.assert_logged(reason)


@needs("nc")
@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b"hello\n", hello_frame(HELLOS[0])])
def test_plain_text_from_netcat_is_refused(target: Target, text: bytes) -> None:
    """Not even a well-formed hello: nothing is read before TLS."""
    for port in target.ports:
        command = ["nc", "-N", "-w", "20", "127.0.0.1", str(port)]
        netcat = subprocess.run(
            command, input=text, capture_output=True, check=False, timeout=PATIENCE
        )
        assert b"group" not in netcat.stdout
    target.assert_logged("does not speak TLS: it began with")


# --- members of something else ---


@pytest.mark.parametrize("name", ["home", "attic"])
def test_a_member_of_another_namespace_is_refused(target: Target, name: str) -> None:
    """Also of one with the same name: it is the secret that counts."""
    other = security(NetworkNamespace.generate(name))
    for port in target.ports:
        with dial(port) as line, pytest.raises(HandshakeRefused, match="namespace"):
            other.dial(line, "the group", soon())
    target.assert_logged("is not in our group")


def test_who_would_accept_anybody_is_refused_all_the_same(target: Target) -> None:
    """A stranger who does not look at our certificate and shows a foreign one."""
    attic, me = NetworkNamespace.generate("attic"), NodeIdentity.ephemeral()
    certificate = Authority.of(attic).issue(me._key.public_key())
    context = stranger(server_side=False, certificate=certificate, key=me._key)
    for port in target.ports:
        assert answer_to(port, context, hello_frame(HELLOS[1])) == b""
    target.assert_logged("another group")


# --- hellos that were right once ---


class Recorded(socket.socket):
    """A socket that keeps what was written to it."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.settimeout(PATIENCE)
        self.connect(("127.0.0.1", port))
        self.written = bytearray()

    def sendall(self, data: bytes, flags: int = 0, /) -> None:  # type: ignore[override]
        """Send and remember."""
        self.written += data
        super().sendall(data, flags)


@pytest.mark.parametrize("hello", HELLOS)
def test_a_recorded_opening_cannot_be_sent_again(target: Target, hello: Join | OpenRequest) -> None:
    """The very bytes of a member, on a connection of one's own: the handshake has other keys."""
    member = Security.load()
    for port in target.ports:
        with Recorded(port) as line:
            opened = member.dial(line, "the group", soon())
            with pytest.raises(HandshakeRefused):
                exchange_hello(opened, hello, OpenReply, soon())
            recording = bytes(line.written)
        with dial(port) as replay:
            say(replay, recording)
            answer = hear(replay)
        assert b"complete" not in answer
    target.assert_logged("(the two could not agree|damaged or forged)")


@pytest.mark.parametrize("hello", HELLOS)
def test_a_member_cannot_repeat_a_hello(target: Target, hello: Join | OpenRequest) -> None:
    """Inside TLS of its own, under the node's own key or another: nobody is let in twice."""
    for member in (Security.load(), security(NetworkNamespace.load_or_create())):
        for port in target.ports:
            with dial(port) as line:
                opened = member.dial(line, "the group", soon())
                with pytest.raises(HandshakeRefused):
                    exchange_hello(opened, hello, OpenReply, soon())
    target.assert_logged(
        "(group is complete|already connected|not expected here|this is rank|another group)"
    )


@pytest.mark.parametrize("rank", range(3))
def test_who_only_has_the_secret_gets_no_lane_either(target: Target, rank: int) -> None:
    """Nor if he knows what names the group: his key is in no roster."""
    double = security(NetworkNamespace.load_or_create())
    for victim, port in enumerate(target.ports):
        lane = OpenRequest(session=LEAKED, rank=rank, to=victim, purpose="everything")
        with dial(port) as line:
            opened = double.dial(line, "the group", soon())
            with pytest.raises(HandshakeRefused):
                exchange_hello(opened, lane, OpenReply, soon())
    target.assert_logged("not a member")


def test_a_stranger_cannot_repeat_a_hello(target: Target) -> None:
    """Behind a handshake without a certificate nothing is read."""
    for port in target.ports:
        for hello in HELLOS:
            assert answer_to(port, stranger(server_side=False), hello_frame(hello)) == b""
    target.assert_logged("showed no certificate")


# --- floods ---


def test_a_flood_of_half_handshakes_is_shrugged_off(target: Target) -> None:
    """Callers that make us answer and then say nothing, until the oldest make room."""
    greeting = client_hello()
    with contextlib.ExitStack() as lines:
        for turn in range(200):
            for port in target.ports:
                say(lines.enter_context(dial(port)), greeting)
            if turn % 50 == 0:
                target.assert_works_on()
        target.assert_logged("too many callers from its address")
