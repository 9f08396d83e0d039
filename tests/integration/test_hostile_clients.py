"""Hostile clients at the ports of a group that works: its ranks neither stop nor swell."""

import contextlib
import random
import re
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.net.frames import HEADER_SIZE, FrameType, encode
from potluck.net.listener import SLOTS
from potluck.wire_messages import Join, OpenReply, OpenRequest, RankEndpoint, pack
from support.ranks import Ranks
from support.tls_pair import client_hello
from support.victims import LEAKED, Target, dial, hear, say, work

IN_CLEAR = "insecure"


def answer_to(port: int, data: bytes) -> bytes:
    """Everything a rank answers until it hangs up."""
    with contextlib.closing(dial(port)) as line:
        say(line, data)
        return hear(line)


def replayed_hellos() -> Iterator[bytes]:
    """Everything that the ranks said to each other while the group formed, and similar."""
    me = RankEndpoint(hosts=["127.0.0.1"], port=1, name="double")
    for rank in range(3):
        yield pack(Join(rank=rank, world_size=3, peer=me))
        for other in range(3):
            yield pack(OpenRequest(session=LEAKED, rank=rank, to=other))
    yield pack(OpenReply(rank=1))


FRAMES = st.builds(
    lambda kind, numbers, length, payload: (
        encode(kind, group=numbers, operation=numbers, tag=7, piece=length, length=length) + payload
    ),
    st.sampled_from(FrameType),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 1),
    st.binary(max_size=3000),
)


def test_a_working_group_shrugs_off_what_strangers_send(ranks: Ranks) -> None:
    """Random bytes, frames out of place, absurd lengths: hypothesis thinks of them."""
    for namespace in (None, IN_CLEAR):
        bombard(Target(ranks.start(work, 3, namespace)))


def bombard(target: Target) -> None:
    """Send whatever hypothesis thinks of to every port, and see what becomes of the group."""
    assert len(target.ports) == 3

    @settings(max_examples=60)
    @given(data=st.binary(max_size=3000) | st.lists(FRAMES, max_size=3).map(b"".join))
    def attack(data: bytes) -> None:
        for port in target.ports:
            with contextlib.closing(dial(port)) as line:
                say(line, data)

    attack()
    target.assert_works_on()
    target.assert_unharmed()


REFUSED = re.compile(
    rb"group is complete|already connected|not expected here|this is rank|another group"
    rb"|cannot be understood"
)
"""What a working group answers one that is in it already, or cannot be."""


def test_a_working_group_lets_no_double_in(ranks: Ranks) -> None:
    """Hellos that were right once are refused with a sentence; in clear, anybody can send them."""
    target = Target(ranks.start(work, 3, IN_CLEAR))
    for port in target.ports:
        for payload in replayed_hellos():
            answer = answer_to(port, encode(FrameType.HELLO, length=len(payload)) + payload)
            assert REFUSED.search(answer), answer
    target.assert_works_on()
    target.assert_unharmed()


def test_a_working_group_does_not_swell_with_callers(ranks: Ranks) -> None:
    """Hundreds that hang up, say nothing, dribble, or send all that they may but one byte."""
    hello = encode(FrameType.HELLO, length=60_000) + bytes(60_000)
    crowd(Target(ranks.start(work, 3, IN_CLEAR)), hello, hello[:-1])
    crowd(Target(ranks.start(work, 3)), client_hello(), client_hello())


def crowd(target: Target, greeting: bytes, most_of_it: bytes) -> None:
    """Call hundreds of times and stay on the line."""
    with contextlib.ExitStack() as lines:
        slow = [lines.enter_context(dial(port)) for port in target.ports for _ in range(5)]
        for turn in range(4 * SLOTS):
            for line in slow:
                say(line, greeting[turn : turn + 1])
            port, other = random.Random(turn).sample(target.ports, 2)
            say(lines.enter_context(dial(target.ports[0])), most_of_it)
            say(lines.enter_context(dial(port)), greeting[: turn % (2 * HEADER_SIZE)])
            dial(other).close()
        target.assert_works_on()
    target.assert_unharmed()
