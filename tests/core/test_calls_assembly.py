"""No memory is taken for what is not allowed, and no piece goes where it does not belong."""

import pytest

from potluck import RpcInvalidMessage
from potluck.core.calls_assembly import Assembly
from potluck.core.calls_frames import Frame, FrameKind, Mark


def piece(number: int, length: int, total: int, marks: int = 0) -> Frame:
    """The header of a piece."""
    return Frame(FrameKind.REQUEST, marks, length, number, total, 0)


def begun(total: int = 10) -> Assembly:
    """Five bytes of message 1 are here."""
    assembly = Assembly(100)
    whole = assembly.accept(piece(1, 5, total, Mark.MORE))
    whole.filled += 5
    return assembly


BAD = {
    "it did not begin": piece(2, 5, 10, Mark.LATER),
    "it announced another length": piece(1, 5, 11, Mark.LATER),
    "it begins twice": piece(1, 5, 10, Mark.MORE),
    "it goes beyond its end": piece(1, 6, 10, Mark.LATER),
    "it ends too soon": piece(1, 4, 10, Mark.LATER),
    "it should have ended": piece(1, 5, 10, Mark.LATER | Mark.MORE),
    "it is too much beside another": piece(2, 5, 91, Mark.MORE),
}


@pytest.mark.parametrize("frame", BAD.values(), ids=BAD)
def test_a_piece_that_does_not_belong_is_refused(frame: Frame) -> None:
    """Whoever sends it does not keep to the protocol."""
    with pytest.raises(RpcInvalidMessage):
        begun().accept(frame)


def test_the_last_piece_completes_it() -> None:
    """And what it had taken is free again."""
    assembly = begun()
    whole = assembly.accept(piece(1, 5, 10, Mark.LATER))
    assert whole.filled == 5
    assert assembly.has(FrameKind.REQUEST, 1)
    assembly.finish(whole)
    assert not assembly.has(FrameKind.REQUEST, 1)
    assert (len(assembly), assembly.octets) == (0, 0)


def test_everything_can_be_forgotten() -> None:
    """When the connection ends."""
    assembly = begun()
    assembly.clear()
    assert (len(assembly), assembly.octets) == (0, 0)


def test_a_short_message_is_not_cut() -> None:
    """Else a peer could begin any number of messages of two bytes, each with memory of its own."""
    assembly = Assembly(100, least=11)
    with pytest.raises(RpcInvalidMessage, match="a message of 10 bytes, which nobody cuts"):
        assembly.accept(piece(1, 5, 10, Mark.MORE))
    assert len(assembly) == 0
    assert assembly.accept(piece(1, 5, 11, Mark.MORE)).filled == 0
