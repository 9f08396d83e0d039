"""The mesh of one view: who may be part of it, how it ends, and the next one on the same ports."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from socket import socketpair

import numpy as np
import pytest

from potluck import DistributedContext
from potluck._types import View
from potluck.backend import stream_backend
from potluck.backend.base import NOTICES, IncomingStreams
from potluck.backend.lanes import MESSAGES, DialTarget, OpenConnection, dial_lane, open_lane
from potluck.backend.port import NodePort
from potluck.backend.stream_backend import MeshConnections, ViewBackend, _is_open
from potluck.errors import (
    Aborted,
    BackendUnavailable,
    ChannelClosed,
    DistributedError,
    HandshakeRefused,
    NoConnection,
    PeerLost,
)
from potluck.net.addresses import Address
from potluck.net.secure_socket import OpeningSocket
from potluck.trust.admission import AdmissionRefused
from potluck.trust.connect import OutgoingCall, dial
from potluck.wire_messages import OpenRequest, RankEndpoint
from support.forks import in_child
from support.threads import PATIENCE, Background, eventually, together
from support.views import Neighbourhood, black_hole, neighbourhood, peer_of, soon, sums, view_of

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


def joining(port: NodePort, view: View, *ports: NodePort) -> Background[ViewBackend]:
    """A member that opens its end of a view."""
    peers = [peer_of(each) for each in ports]
    return Background(lambda: ViewBackend(port, view, port.process, peers, deadline=soon()))


# --- the mesh ---


def test_members_come_and_go_on_the_same_ports(here: Neighbourhood) -> None:
    """Three views, one after the other: whoever is in the next one needs no new port."""
    ann, ben, cleo, dora = (here.machine() for _ in range(4))
    first = here.open(view_of(ann, ben, cleo), [ann, ben, cleo])
    assert sums(first) == [6.0] * 3
    for backend in first:
        backend.abort(SUPERSEDED)
    second = here.open(view_of(ann, cleo, epoch=2), [ann, cleo])
    assert sums(second) == [3.0] * 2
    for backend in second:
        backend.close()
    third = here.open(view_of(cleo, dora, ann, ben, epoch=3), [cleo, dora, ann, ben])
    assert sums(third) == [10.0] * 4
    assert third[2].rank == 2
    assert third[2].view.epoch == 3


def test_members_of_one_machine_are_told_apart_by_their_start(secure: Neighbourhood) -> None:
    """They share a key, and yet each is itself."""
    ports = [secure.port() for _ in range(4)]
    assert sums(secure.open(view_of(*ports), ports), 100_000) == [10.0] * 4


def test_a_view_of_one_needs_nobody(here: Neighbourhood) -> None:
    """Everything works alone, messages to oneself included."""
    ann = here.machine()
    (alone,) = here.open(view_of(ann), [ann])
    alone.barrier(timeout=PATIENCE)
    assert sums([alone]) == [1.0]
    inbox = bytearray(4)
    alone.send(b"note", 0)
    alone.recv(inbox, 0)
    assert inbox == b"note"
    assert alone.peer_name(0) == f"desk-{ann.slot}"


def test_ranks_are_named_for_people(secure: Neighbourhood) -> None:
    """Their machine and their address."""
    ports = [secure.machine(), secure.machine()]
    left, right = secure.open(view_of(*ports), ports)
    assert right.peer_name(0) == f"desk-{ports[0].slot} at 127.0.0.1:{ports[0].port}"
    assert left.peer_name(0) == f"desk-{ports[0].slot}"


def test_messages_and_streams_go_their_own_ways(here: Neighbourhood) -> None:
    """As in any other group: point to point, barriers, and a connection for each purpose."""
    ports = [here.machine(), here.machine()]
    left, right = here.open(view_of(*ports), ports)
    inbox = bytearray(1 << 21)
    together(lambda: left.send(bytes(1 << 21), 1), lambda: right.recv(inbox, 0))
    together(left.barrier, right.barrier)
    one, other = together(
        lambda: left.open_stream(1, "soup", soon(), lambda: None),
        lambda: right.open_stream(0, "soup", soon(), lambda: None),
    )
    assert (one.seal is None) == (other.seal is None)
    one.stream.close()
    other.stream.close()


def test_a_member_whose_first_address_is_a_black_hole_is_reached_by_its_second(
    secure: Neighbourhood,
) -> None:
    """And a third that does not exist at all does no harm."""
    ann, ben = secure.machine("127.0.0.1"), secure.machine("127.0.0.1")
    view = view_of(ann, ben)
    with black_hole("127.0.0.2", ann.port):
        peers = [peer_of(ann, "127.0.0.2", "127.0.0.1", "nowhere.invalid"), peer_of(ben)]
        begin = time.monotonic()
        backends = together(
            lambda: ViewBackend(ann, view, ann.process, peers, deadline=soon()),
            lambda: ViewBackend(ben, view, ben.process, peers, deadline=soon()),
        )
        with backends[0], backends[1]:
            assert time.monotonic() - begin < 3, "less than a single attempt may take"
            assert sums(backends) == [3.0] * 2


# --- early and late ---


def test_a_member_that_is_early_waits_for_the_others(secure: Neighbourhood) -> None:
    """Its lane is at the door before anybody serves the view there."""
    ann, ben = secure.machine(), secure.machine()
    view = view_of(ann, ben)
    early = joining(ben, view, ann, ben)
    eventually(lambda: ann._lobby.waiting == 1)
    late = joining(ann, view, ann, ben)
    with early.result() as right, late.result() as left:
        assert sums([left, right]) == [3.0] * 2


def test_a_lane_of_another_view_does_not_fit(secure: Neighbourhood) -> None:
    """The same members at another epoch: it waits in vain, while the right one opens."""
    ann, ben = secure.machine(), secure.machine()
    stale = Background(
        lambda: open_lane(
            OpenRequest(session=view_of(ann, ben, epoch=7).session, rank=1, to=0),
            DialTarget(ben.members, peer_of(ann), soon(0.5)),
        )
    )
    eventually(lambda: ann._lobby.waiting == 1)
    assert sums(secure.open(view_of(ann, ben), [ann, ben])) == [3.0] * 2
    with pytest.raises(NoConnection, match="rank 0"):
        stale.result()


def test_opening_ends_when_the_view_is_superseded(secure: Neighbourhood) -> None:
    """At once, although the other member is nowhere to be seen; the port goes on."""
    ann, ben, cleo = (secure.machine() for _ in range(3))
    is_over = threading.Event()

    def look() -> None:
        if is_over.is_set():
            raise SUPERSEDED

    peers = [peer_of(port) for port in (ann, ben, cleo)]
    view = view_of(ann, ben, cleo)
    waiting = Background(
        lambda: ViewBackend(ben, view, ben.process, peers, deadline=soon(), look=look)
    )
    eventually(lambda: ann._lobby.waiting == 1)
    assert not waiting.ended
    is_over.set()
    with pytest.raises(Aborted, match="view 1 is over"):
        waiting.result(2)
    assert sums(secure.open(view_of(ann, ben, epoch=2), [ann, ben])) == [3.0] * 2


def test_opening_ends_whatever_interrupts_it(secure: Neighbourhood) -> None:
    """An error of the program's own, such as Ctrl-C: it is raised, and nothing stays open."""
    ann, ben, cleo = (secure.machine() for _ in range(3))

    def look() -> None:
        if ann._lobby.waiting:
            raise KeyboardInterrupt

    peers = [peer_of(port) for port in (ann, ben, cleo)]
    view = view_of(ann, ben, cleo)
    with pytest.raises(KeyboardInterrupt):
        ViewBackend(ben, view, ben.process, peers, deadline=soon(), look=look)
    assert "this view has ended here" in knock(cleo, view, 2, ben)


def test_a_machine_without_threads_says_so(
    secure: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who cannot dial opens nothing; who cannot let others wait sends them away for now."""
    ann, ben = secure.machine(), secure.machine()
    view, peers = view_of(ann, ben), [peer_of(ann), peer_of(ben)]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BackendUnavailable, match="cannot start a thread to connect with"):
            ViewBackend(ben, view, ben.process, peers, deadline=soon())
        assert "cannot start another thread" in knock(ben, view, 1, ann)
    assert sums(secure.open(view_of(ann, ben, epoch=2), [ann, ben])) == [3.0] * 2


def test_who_does_not_come_is_named_with_the_reason(secure: Neighbourhood) -> None:
    """Those we dial and those who dial us."""
    ann, ben, cleo = (secure.machine() for _ in range(3))
    view, peers = view_of(ann, ben, cleo), [peer_of(port) for port in (ann, ben, cleo)]
    ann.close()
    with pytest.raises(
        NoConnection,
        match=rf"ranks 0, 2 .* rank 0 on desk-{ann.slot} could not be reached .*refused.*"
        rf"rank 2 on desk-{cleo.slot} did not connect",
    ):
        ViewBackend(ben, view, ben.process, peers, deadline=soon(0.3))
    with pytest.raises(NoConnection, match=rf"connect to rank 0 on desk-{ann.slot} \(127"):
        ViewBackend(ben, view_of(ann, ben), ben.process, peers[:2], deadline=soon(0.3))


def test_whoever_is_no_member_opens_nothing(secure: Neighbourhood) -> None:
    """Nor does a member that was told of too few others."""
    ann, ben, cleo = (secure.machine() for _ in range(3))
    peers = [peer_of(ann), peer_of(ben)]
    with pytest.raises(BackendUnavailable, match="it is not a member"):
        ViewBackend(cleo, view_of(ann, ben), cleo.process, peers, deadline=soon())
    with pytest.raises(BackendUnavailable, match="1 peers were named"):
        ViewBackend(ann, view_of(ann, ben), ann.process, peers[:1], deadline=soon())


def test_a_member_that_gave_up_and_came_again_is_connected(secure: Neighbourhood) -> None:
    """Its second lane takes the place of the first while the view still waits for others."""
    ann, ben, cleo = (secure.machine() for _ in range(3))
    view, peers = view_of(ann, ben, cleo), [peer_of(port) for port in (ann, ben, cleo)]
    first = joining(ann, view, ann, ben, cleo)
    with pytest.raises(NoConnection, match="rank 2"):
        ViewBackend(ben, view, ben.process, peers, deadline=soon(0.3))
    others = [joining(port, view, ann, ben, cleo) for port in (ben, cleo)]
    backends = [one.result() for one in (first, *others)]
    for backend in backends:
        secure.stack.callback(backend.close)
    assert sums(backends) == [6.0] * 3


# --- who is refused ---


def knock(port: NodePort, view: View, rank: int, at: NodePort, purpose: str = "messages") -> str:
    """What somebody hears who dials once as a rank of a view."""
    lane = OpenRequest(session=view.session, rank=rank, to=0, purpose=purpose)
    try:
        sock = dial(port.members, OutgoingCall(Address("127.0.0.1", at.port), soon()))
        with contextlib.closing(sock):
            dial_lane(sock, lane, port.members, soon())
    except HandshakeRefused as error:
        return str(error)
    return "come in"


def test_nobody_takes_the_rank_of_another(secure: Neighbourhood) -> None:
    """Not another member, not another start of the same machine, not a member once more."""
    ann, ben, cleo = (secure.machine() for _ in range(3))
    twin = secure.port(cleo.members.security)
    view = view_of(ann, ben, cleo)
    left, *_ = secure.open(view, [ann, ben, cleo])
    assert "another node joined as rank 2" in knock(ben, view, 2, ann, "soup")
    assert "rank 2 is an earlier process on that machine" in knock(twin, view, 2, ann, "soup")
    assert "rank 2 is already connected" in knock(cleo, view, 2, ann)
    assert "rank 0 is not expected here" in knock(ann, view, 0, ann, "soup")
    assert left._switchboard.count(2) == 0


def test_an_earlier_start_of_a_member_is_not_taken_for_it(secure: Neighbourhood) -> None:
    """The view waits for the one that it names."""
    ann, old = secure.machine(), secure.machine()
    new = secure.port(old.members.security)
    view = view_of(ann, new)
    waiting = joining(ann, view, ann, new)
    eventually(lambda: view.session in ann._lobby._intakes)
    assert "rank 1 is a later process on that machine" in knock(old, view, 1, ann)
    with joining(new, view, ann, new).result() as right, waiting.result() as left:
        assert sums([left, right]) == [3.0] * 2


def test_a_dialler_opens_no_lane_to_another_node(secure: Neighbourhood) -> None:
    """Who listens at a member's address has to be that member."""
    ann, ben, cleo = (secure.machine() for _ in range(3))
    view, peers = view_of(ann, ben), [peer_of(cleo), peer_of(ben)]
    with pytest.raises(NoConnection, match="answered instead of"):
        ViewBackend(ben, view, ben.process, peers, deadline=soon(1))
    assert cleo._lobby.waiting == 0


def test_a_stranger_gets_no_lane(secure: Neighbourhood) -> None:
    """Who does not belong to the namespace does not get as far as its hello."""
    ann, ben = secure.machine(), secure.machine()
    view = view_of(ann, ben)
    with neighbourhood() as elsewhere:
        assert "namespace" in knock(elsewhere.machine(), view, 1, ann)
    assert ann._lobby.waiting == 0


def test_what_cannot_be_reached_is_not_dialled_by_everybody_at_once(
    secure: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large view has a bounded number of diallers, and all members are connected in the end."""
    monkeypatch.setattr(stream_backend, "AT_ONCE", 2)
    ports = [secure.machine() for _ in range(5)]
    assert sums(secure.open(view_of(*ports), ports)) == [15.0] * 5


def test_a_member_that_does_not_belong_ends_the_opening_at_once(
    secure: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time does not change what the roster says."""
    ann, ben = secure.machine(), secure.machine()
    view, peers = view_of(ann, ben), [peer_of(ann), peer_of(ben)]
    monkeypatch.setattr(ben.members, "judge_peer", lambda _: AdmissionRefused("it was revoked"))
    is_over = threading.Event()

    def look() -> None:
        if is_over.is_set():
            raise SUPERSEDED

    waiting = Background(
        lambda: ViewBackend(ann, view, ann.process, peers, deadline=soon(), look=look)
    )
    with pytest.raises(HandshakeRefused, match="it was revoked"):
        ViewBackend(ben, view, ben.process, peers, deadline=soon())
    is_over.set()
    with contextlib.suppress(Aborted):  # or it was connected for a moment
        waiting.result().close()


# --------------------------------------------------------------------------------------------------
# The end of a view: everything that runs on its mesh ends at once, and the ports go on.

ENDINGS_SUPERSEDED = Aborted("view 1 is over")


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
    backends[0].abort(ENDINGS_SUPERSEDED)
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
    left.abort(ENDINGS_SUPERSEDED)
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

        def keep(sock: OpeningSocket, _: OpenRequest) -> None:
            held.callback(sock.close)
            asked.set()

        ann.serve(backends[0].view.session, keep)
        opening = Background(lambda: backends[1].open_stream(0, "soup", soon(), lambda: None))
        assert asked.wait(PATIENCE)
        backends[1].abort(ENDINGS_SUPERSEDED)
        with pytest.raises(Aborted, match="view 1 is over"):
            opening.result(2)


def test_the_others_are_told_that_a_rank_has_left(secure: Neighbourhood) -> None:
    """They lose it at once, whether it closed or was aborted; the first ending counts."""
    ports = [secure.machine() for _ in range(3)]
    ann, ben, cleo = secure.open(view_of(*ports), ports)
    waiting = Background(lambda: cleo.recv(bytearray(4), 0))
    ann.abort(ENDINGS_SUPERSEDED)
    ann.abort(ChannelClosed("too late"))
    ann.close()
    with pytest.raises(PeerLost, match="Rank 0"):
        waiting.result()
    with pytest.raises(Aborted, match="view 1 is over"):
        ann.barrier()
    ben.close()
    ben.abort(ENDINGS_SUPERSEDED)
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
            *(lambda one=one: one.abort(ENDINGS_SUPERSEDED) or [] for one in before),
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
                backend.abort(ENDINGS_SUPERSEDED)
                backend.close()
                port.close()
            return str(error)
        return "it works"

    assert "belongs to the parent process" in in_child(misuse)
    assert sums(backends) == [3.0] * 2
    assert sums(secure.open(view_of(*ports, epoch=2), ports)) == [3.0] * 2


# --------------------------------------------------------------------------------------------------
# Gathering the lanes of a view: those of members who are still there.

SOMEBODY = RankEndpoint(["127.0.0.1"], 1, "somebody", "")


def never(rank: int, check: object) -> OpenConnection:
    """Dials nobody: the first rank only waits."""
    raise AssertionError(rank, check)


def test_a_lane_that_was_given_up_is_not_taken_for_its_member() -> None:
    """Who gave up and comes again is awaited, also when all others are here by then."""
    switchboard = IncomingStreams()
    (gone, theirs), (kept, other), (again, far) = socketpair(), socketpair(), socketpair()
    try:
        switchboard.put(1, MESSAGES, OpenConnection(gone))
        theirs.close()
        gathering = MeshConnections(0, [SOMEBODY] * 3, switchboard, never)
        end = time.monotonic() + PATIENCE
        gathered = Background(lambda: gathering.gather(end, lambda: None, lambda: None, _is_open))
        switchboard.put(2, MESSAGES, OpenConnection(kept))
        eventually(lambda: switchboard.absent([1, 2], MESSAGES) == [1])
        assert gone.fileno() == -1  # closed on this side as well
        switchboard.put(1, MESSAGES, OpenConnection(again))
        assert {rank: lane.sock for rank, lane in gathered.result().items()} == {1: again, 2: kept}
    finally:
        for sock in (gone, theirs, kept, other, again, far):
            sock.close()


def test_a_lane_that_has_carried_bytes_is_its_member_s_also_when_it_has_ended() -> None:
    """They may be its last words, which tell more than that it did not connect."""
    used, theirs = socketpair()
    with used:
        theirs.close()
        assert _is_open(OpenConnection(used, first=b"goodbye"))
        assert not _is_open(OpenConnection(used))
