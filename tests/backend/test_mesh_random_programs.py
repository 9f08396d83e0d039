"""Random programs of sends, receives, time-outs and cancels, beside a model of plain queues.

Whatever the order: a message is received once or not at all, never changed, and messages of one key
come in the order they were sent.  Only where several of one key are pending on both sides and one
that is not the newest is cancelled in the middle may two messages change places.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from potluck import SizeMismatch
from potluck.backend.mesh import MeshBackend
from potluck.backend.messages import MessageLimits
from potluck.backend.operation import Cancelled, Operation
from support.meshes import kept_bytes, memory_group

LIMITS = MessageLimits(eager=120, credit=1_500, courtesy=4_000)
SIZES = {0: 4, 1: 100, 2: 121, 3: 2_000, 4: 0}
"""Tag -> size of its messages: at once, offered, in need of several writes, and empty."""

CAPACITY = 700
"""Bytes a pipe holds: less than a message, so that most of them stop half-way."""

ROUNDS = 5_000
"""Turns of every pump after which nothing should be under way any more."""

Key = tuple[int, int, int]
"""(sender, receiver, tag)"""


def content(number: int, size: int) -> bytes:
    """What message ``number`` looks like."""
    return (number.to_bytes(4, "big") + random.Random(number).randbytes(size))[:size]


@dataclass(eq=False)
class Post:
    """A send or a receive of the program."""

    key: Key
    operation: Operation
    buffer: bytearray
    number: int = 0
    """Of the message; for a receive, 0."""
    fits: bool = True
    cancelled: bool = False
    settled: bool = False
    got: bytes | None = None


@dataclass
class Queue:
    """The model of one key."""

    sends: list[Post] = field(default_factory=list)
    receives: list[Post] = field(default_factory=list)
    strict: bool = True


class Programs(RuleBasedStateMachine):
    """One thread plays all ranks; bytes move only when a rule lets a rank pump."""

    @initialize(size=st.integers(2, 4), data=st.data())
    def gather(self, size: int, data: st.DataObject) -> None:
        """A new group, and the few keys it uses, so that their queues fill up."""
        self.stack = contextlib.ExitStack()
        self.group: list[MeshBackend] = self.stack.enter_context(
            memory_group(size, LIMITS, capacity=CAPACITY)
        )
        self.queues: dict[Key, Queue] = {}
        self.messages = 0
        ranks, tags = st.integers(0, size - 1), st.sampled_from(sorted(SIZES))
        self.keys = data.draw(st.lists(st.tuples(ranks, ranks, tags), min_size=1, max_size=4))

    def queue(self, key: Key) -> Queue:
        """The model's queue of a key."""
        return self.queues.setdefault(key, Queue())

    @rule(data=st.data())
    def post_send(self, data: st.DataObject) -> None:
        """Somebody starts sending."""
        self.send(data.draw(st.sampled_from(self.keys)))

    @rule(data=st.data(), fits=st.sampled_from([True, True, True, False]))
    def post_receive(self, data: st.DataObject, fits: bool) -> None:
        """Somebody starts receiving, sometimes into a buffer of another size."""
        key = data.draw(st.sampled_from(self.keys))
        # What is being withdrawn may still end a receive of another size, which never wanted it.
        withdrawn = any(send.cancelled for send in self.queue(key).sends)
        self.receive(key, fits=fits or withdrawn)

    def send(self, key: Key) -> None:
        """Post the next message of a key."""
        self.messages += 1
        buffer = bytearray(content(self.messages, SIZES[key[2]]))
        operation = self.group[key[0]].post_send(buffer, key[1], tag=key[2])
        self.queue(key).sends.append(Post(key, operation, buffer, self.messages))
        self.settle()

    def receive(self, key: Key, *, fits: bool = True) -> Post:
        """Post a receive of a key."""
        buffer = bytearray(SIZES[key[2]] + (not fits))
        operation = self.group[key[1]].post_recv_into(buffer, key[0], tag=key[2])
        post = Post(key, operation, buffer, fits=fits)
        self.queue(key).receives.append(post)
        self.settle()
        return post

    @rule(data=st.data(), times=st.integers(1, 4))
    def pump(self, data: st.DataObject, times: int) -> None:
        """A rank moves what can be moved."""
        mesh = data.draw(st.sampled_from(self.group))
        for _ in range(times):
            mesh.progress()
        self.settle()

    @rule(data=st.data())
    def be_courteous(self, data: st.DataObject) -> None:
        """A rank takes in offers, as one does whose own send waits long."""
        data.draw(st.sampled_from(self.group))._inbox.take_offers()
        self.settle()

    @precondition(lambda self: any(self.pending()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Somebody gives up; from then on its buffer is its own."""
        post = data.draw(st.sampled_from(list(self.pending())))
        queue = self.queue(post.key)
        line = queue.receives if post in queue.receives else queue.sends
        newest = [one for one in line if not one.cancelled][-1]
        if post.operation.cancel():
            post.cancelled = True
            queue.strict = queue.strict and post is newest
        self.settle()

    def pending(self) -> Iterator[Post]:
        """What may be given up.

        An empty message has no bytes to hold back, and one that nobody can receive is discarded:
        whoever gives those up may be too late without knowing.
        """
        for key, queue in self.queues.items():
            yield from (receive for receive in queue.receives if not receive.settled)
            if SIZES[key[2]] and all(receive.fits for receive in queue.receives):
                yield from (send for send in queue.sends if not send.settled)

    def settle(self) -> None:
        """Note what is done, and scribble over every buffer that is the caller's again."""
        for queue in self.queues.values():
            for post in (*queue.sends, *queue.receives):
                if post.settled or not post.operation.done:
                    continue
                post.settled = True
                error = post.operation.error
                assert post.cancelled == isinstance(error, Cancelled)
                if post.number:
                    assert post.cancelled or error is None
                elif not post.cancelled:
                    assert isinstance(error, SizeMismatch) != post.fits
                    post.got = bytes(post.buffer) if post.fits else None
                post.buffer[:] = b"\xee" * len(post.buffer)
        # Whoever gives a receive up in the middle of a message keeps that, whatever the limits are.
        given_up = sum(r.cancelled for queue in self.queues.values() for r in queue.receives)
        left = max(SIZES.values()) * given_up
        for mesh in self.group:
            assert kept_bytes(mesh) <= LIMITS.credit * len(self.group) + LIMITS.courtesy + left

    def run_dry(self) -> None:
        """Let every rank pump until nothing moves any more."""
        for _ in range(ROUNDS):
            busy = [mesh for mesh in self.group if mesh._poller.wait(0)]
            if not busy:
                break
            while busy[0]._poller.wait(0):
                busy[0].progress()
        else:
            pytest.fail("it never comes to rest")
        self.settle()

    def check(self, queue: Queue) -> None:
        """The receives that are done got the messages they should have."""
        sent = [send for send in queue.sends if not send.cancelled]
        receives = [receive for receive in queue.receives if not receive.cancelled]
        done = [receive for receive in receives if receive.settled]
        assert len(done) == min(len(sent), len(receives))
        assert sum(send.settled for send in sent) >= len(done)
        if queue.strict:
            assert done == receives[: len(done)]
            for send, receive in zip(sent, done, strict=False):
                if receive.fits:
                    assert receive.got == content(send.number, SIZES[send.key[2]])
        else:
            known = {content(send.number, SIZES[send.key[2]]) for send in sent}
            got = [receive.got for receive in done if receive.got]
            assert set(got) <= known
            assert len(set(got)) == len(got)

    def teardown(self) -> None:
        """Everything that was sent can be received, and is received once."""
        if not hasattr(self, "group"):
            return
        with self.stack:
            self.run_dry()
            for queue in self.queues.values():
                self.check(queue)
            for key, queue in self.queues.items():
                live = [
                    len([post for post in line if not post.cancelled])
                    for line in (queue.sends, queue.receives)
                ]
                for _ in range(live[0] - live[1]):
                    self.receive(key)
                for _ in range(live[1] - live[0]):
                    self.send(key)
            self.run_dry()
            for queue in self.queues.values():
                self.check(queue)
                assert all(post.settled for post in (*queue.sends, *queue.receives))
                assert all(set(post.buffer) <= {0xEE} for post in (*queue.sends, *queue.receives))


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=40, stateful_step_count=50)
