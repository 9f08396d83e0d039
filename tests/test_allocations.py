"""Nobody outside decides how much memory we take: each place that might let him has a bound."""

from pathlib import Path

import pytest

from support import allocations, architecture

SOURCE = Path(__file__).parent.parent / "src" / "potluck"

# Function -> what keeps the size small.
BOUNDED = {
    "potluck.rpc.protocol.Assembly.__init__": "what Assembly.accept has found allowed",
    "potluck.net.records.EncryptedStream.send": "bytes that our own caller handed over",
    "potluck.net.secure_socket.SecureSocket.__init__": "a copy of bytes that are here",
    "potluck.backend.fallback_stream.MessageStream._advance": "checked against CHUNK just before",
    "potluck.backend.adapters.mpi.MpiBackend._receive": "checked against CHUNK just before",
    "potluck.backend.adapters.base.PlainMesh._receive": "checked against CHUNK just before",
    "potluck.net.tcp._machine": "a file of this machine's own kernel",
    "potluck.backend.messages.Inbox._begin_eager": "Limits.eager, and the sender's credit",
    "potluck.backend.messages.Inbox.complete_small": "a copy, within the sender's credit",
    "potluck.backend.messages.Inbox.send_to_myself": "a copy, within Limits.courtesy",
    "potluck.backend.messages.Inbox.take_offers": "Limits.courtesy",
    "potluck.backend.messages.IncomingMessage.keep": "a receive that our own caller posted",
    "potluck.backend.framing.EncryptedReader._landing": "a frame's header is checked: MAX_PIECE",
    "potluck.backend.framing.EncryptedWriter._enter": "our own frames: MAX_PIECE",
    "potluck.backend.framing.EncryptedWriter._take_spare": "one of ROOMS",
}


def test_every_allocation_has_a_bound() -> None:
    """A new one is added to the table with what bounds it; an entry without need is an error."""
    assert sorted(allocations.found(architecture.load(SOURCE))) == sorted(BOUNDED)


def planted(source: str, room: str = "net.planted") -> dict[str, str]:
    """What is found in a function of a module in some room."""
    body = f'"""A planted module."""\nclass A:\n    def f(self, n):\n        {source}'
    return allocations.found(architecture.parse({f"potluck.{room}": body}))


@pytest.mark.parametrize(
    "source",
    [
        "return bytearray(n)",
        "return memoryview(bytearray(header.length))",
        "x = [numpy.zeros(n + 1) for _ in range(3)]",
        "return lambda: np.empty(n * SIZE)",
        "data = path.read_bytes()",
        "line = file.readline()",
    ],
)
def test_a_size_that_comes_from_outside_is_found(source: str) -> None:
    """Hidden in another call, in a sum or in a lambda; and reads that somebody else ends."""
    assert list(planted(source)) == ["potluck.net.planted.A.f"]
    assert list(planted(source, "backend.planted")) == ["potluck.backend.planted.A.f"]


@pytest.mark.parametrize(
    "source",
    [
        "return bytearray(1 << 16)",
        "return bytearray()",
        "return memoryview(bytearray(READ_AHEAD + 2 * TAG_SIZE))",
        "return bytearray(SIZE.size)",
        "return file.readline(100)",
    ],
)
def test_a_fixed_size_is_welcome(source: str) -> None:
    """Numbers, constants, and what is made of them."""
    assert planted(source) == {}
