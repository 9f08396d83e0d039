"""Short messages pass long ones, and long ones come through all the same."""

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.calls_assembly import Assembly
from potluck.core.calls_frames import HEADER_SIZE, FrameKind, Mark, read_frame
from potluck.core.calls_outbox import BATCH, Outbox

KIND = FrameKind.REQUEST


def add_long(outbox: Outbox, number: int, size: int) -> None:
    """A message of that many bytes."""
    outbox.add_long(KIND, number, [memoryview(bytes([number]) * size)])


def numbers(outbox: Outbox, count: int) -> list[int]:
    """The numbers of the next long messages of which a piece is taken."""
    return [read_frame(outbox.take()[0], 0, 1 << 20).number for _ in range(count)]


def test_short_messages_pass_a_long_one() -> None:
    """All of them at once, after at most one piece."""
    outbox = Outbox(piece=10)
    add_long(outbox, 1, 25)
    outbox.add_short(b"short one")
    outbox.add_short(b"short two")
    assert outbox.take() == [b"short one", b"short two"]
    assert numbers(outbox, 1) == [1]
    outbox.add_short(b"short three")
    assert outbox.take() == [b"short three"]


def test_short_messages_never_stop_a_long_one() -> None:
    """After each batch comes a piece."""
    outbox = Outbox(piece=10)
    add_long(outbox, 1, 25)
    pieces = 0
    for _ in range(6):
        outbox.add_short(b"again")
        pieces += len(outbox.take()[0]) == HEADER_SIZE
    assert pieces == 3


def test_a_batch_is_bounded() -> None:
    """In messages and in bytes."""
    outbox = Outbox(piece=1000)
    for _ in range(2 * BATCH):
        outbox.add_short(b"x")
    assert len(outbox.take()) == BATCH
    for _ in range(2):
        outbox.add_short(b"y" * 1000)
    outbox.take()
    assert outbox.take() == [b"y" * 1000]


def test_long_messages_take_turns_as_far_as_allowed() -> None:
    """What is allowed at a time begins; the next begins when there is room for it."""
    outbox = Outbox(piece=10)
    outbox.allow(45)
    for number in (1, 2, 3):
        add_long(outbox, number, 20)
    assert numbers(outbox, 6) == [1, 2, 1, 2, 3, 3]
    assert outbox.take() == []


def test_a_message_over_everything_allowed_goes_alone() -> None:
    """It would never go otherwise."""
    outbox = Outbox(piece=10)
    outbox.allow(5)
    add_long(outbox, 1, 20)
    add_long(outbox, 2, 20)
    assert numbers(outbox, 4) == [1, 1, 2, 2]


def test_a_message_that_has_not_begun_can_be_withdrawn() -> None:
    """One that has begun cannot."""
    outbox = Outbox(piece=10)
    add_long(outbox, 1, 20)
    add_long(outbox, 2, 20)
    outbox.take()
    assert not outbox.withdraw(KIND, 1)
    assert not outbox.withdraw(KIND, 7)
    outbox.allow(0)
    add_long(outbox, 3, 20)
    add_long(outbox, 4, 20)
    assert outbox.withdraw(KIND, 4)
    assert outbox.withdraw(KIND, 3)


def test_what_waits_is_counted() -> None:
    """Down to nothing."""
    outbox = Outbox(piece=10)
    assert outbox.is_empty
    add_long(outbox, 1, 25)
    outbox.add_short(b"short")
    assert outbox.octets == 30
    while outbox.take():
        pass
    assert outbox.octets == 0
    assert outbox.is_empty


def test_one_large_answer_is_not_owed_and_the_next_ones_are() -> None:
    """A peer may be slow to fetch one; with more than that it takes without end."""
    outbox = Outbox(piece=10)
    outbox.allow(15)
    for number in (1, 2):
        outbox.add_long(FrameKind.RESPONSE, number, [memoryview(bytes(20))])
    assert (outbox.octets, outbox.owed) == (40, 20)
    assert numbers(outbox, 4) == [1, 1, 2, 2]
    assert (outbox.octets, outbox.owed) == (0, 0)
    outbox.add_long(FrameKind.RESPONSE, 3, [memoryview(bytes(20))])
    assert outbox.owed == 0
    outbox.add_long(FrameKind.RESPONSE, 4, [memoryview(bytes(12))])
    assert outbox.owed == 12


@given(
    st.lists(st.lists(st.binary(max_size=30), min_size=1), max_size=6),
    st.integers(1, 40),
    st.integers(1, 200),
)
def test_what_is_cut_is_put_together_again(
    messages: list[list[bytes]], piece: int, allowed: int
) -> None:
    """Whatever the parts and pieces; the other side never holds more than it allows."""
    outbox, assembly = Outbox(piece), Assembly(allowed)
    outbox.allow(allowed)
    expected = {number: b"".join(parts) for number, parts in enumerate(messages) if any(parts)}
    for number, parts in enumerate(messages):
        if any(parts):
            outbox.add_long(KIND, number, [memoryview(part) for part in parts], patience=9)
    found = {}
    while frame := outbox.take():
        header = read_frame(frame[0], 0, 1 << 20)
        body = b"".join(frame[1:])
        assert len(frame[0]) == HEADER_SIZE
        assert len(body) == header.length <= piece
        whole = assembly.accept(header)
        whole.view[whole.filled : whole.filled + len(body)] = body
        whole.filled += len(body)
        large = [len(each) for each in expected.values() if len(each) > allowed]
        assert assembly.octets <= allowed + max(large, default=0)
        if not header.marks & Mark.MORE:
            assembly.finish(whole)
            found[header.number] = bytes(whole.view)
    assert found == expected
    assert (len(assembly), assembly.octets) == (0, 0)
