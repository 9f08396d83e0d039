"""TcpBackend: ranks in processes, on one machine or many, each connected to each."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import queue
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from potluck._decode import printable
from potluck._types import Seconds, in_seconds
from potluck.backend.base import check_whole
from potluck.backend.port import JoinHandler, NodePort
from potluck.backend.stream_backend import StreamBackend
from potluck.errors import (
    BackendUnavailable,
    DistributedError,
    HandshakeRefused,
    InvalidRank,
    InvalidWorldSize,
    MalformedFrame,
    SelfSend,
    Timeout,
    from_os_error,
)
from potluck.identity.node import machine_name, this_process
from potluck.launch_env import read_launch
from potluck.logs import get_logger
from potluck.net import tcp
from potluck.net.addresses import Address, is_loopback, parse_address, unmapped, usable_hosts
from potluck.net.opening import RefusedByPeer, RefusedForNow, answer, await_answer, refuse
from potluck.net.secure_socket import NOBODY, OpeningSocket, SecureSocket
from potluck.trust.admission import (
    ANYWHERE,
    JoinRequested,
    judge_entry,
    judge_table,
    list_ranks,
)
from potluck.trust.connect import Declined, OutgoingCall, dial, say_hello
from potluck.trust.membership_store import TrustStore
from potluck.wire_messages import Join, OpenReply, RankEndpoint, Table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from potluck.identity.namespace import NetworkNamespace


# --------------------------------------------------------------------------------------------------
# Meeting at rank 0: every rank learns who and where all others are.
#
# Rank 0 listens at the master address.  The others dial it, in any order and as often as needed,
# say who and where they are, and get the table when all have come.  Then the mesh is formed like
# that of a view (:mod:`potluck.backend.stream_backend`).  A rank that is refused is told why; the
# others do not notice.

logger = get_logger(__name__)

COMPLETE = "this group is complete"

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two attempts to reach rank 0: doubling, with jitter so that ranks spread out."""

FULL_PAUSE = 0.25
"""Seconds until a group that was complete is asked again: an earlier one may be about to leave."""

WATCH_EVERY = 0.05
"""Seconds between two looks at whether a rank that waits has hung up."""

ANSWER_WITHIN = 2.0
"""Seconds after which the process that listens at the master address is taken for another one."""

TABLE_PART = 1 << 15
"""Bytes of the table in one frame: half of what fits, as a single peer may take a quarter."""

GRACE = 1.0
"""Seconds a rank whose time is up still listens to rank 0, which knows who is missing."""

_SAME_START = "Check that they were started with the same master address and world size."
_SAME_PEERS = "Check that they were started with the same list of peers and on the right machines."


@dataclass(frozen=True, slots=True)
class RendezvousRequest:
    """What a rank brings to the rendezvous."""

    rank: int
    world_size: int
    masters: Sequence[Address]
    timeout: float
    deadline: float
    members: TrustStore
    port: int = 0
    """Where ranks other than 0 listen; 0 is any that is free."""
    peers: Sequence[Address] = ()
    """Where each rank listens, if that is agreed beforehand."""
    mapped: bool = False
    """Whether the master address may be one that leads to rank 0 and is not its own."""

    def entry(self, rank: int) -> str:
        """A rank for an error message, with its entry in the list of peers where there is one."""
        where = f" (peers[{rank}], {self.peers[rank]})" if self.peers else ""
        return f"rank {rank}{where}"


def shown(peer: RankEndpoint) -> RankEndpoint:
    """The same with a name and addresses that do no harm in an error message."""
    hosts = [printable(host) for host in peer.hosts]
    return structs.replace(peer, name=printable(peer.name), hosts=hosts)


def missing_error(meeting: RendezvousRequest, missing: Sequence[int], what: str) -> Timeout:
    """The error for ranks that did not connect, with why the last caller was refused."""
    cause = meeting.members.last_refusal
    hint = None if cause else _SAME_PEERS if meeting.peers else _SAME_START
    stranger = meeting.members.last_stranger
    if stranger is not None and cause is None:
        cause, hint = printable(stranger.message), stranger.hint
    who = ", ".join(map(meeting.entry, missing)) if meeting.peers else list_ranks(missing)
    return Timeout(
        f"Rank {meeting.rank} waited {meeting.timeout:g} s for {who}, which {what}",
        seconds=meeting.timeout,
        missing=missing,
        rank=missing[0],
        cause=cause,
        hint=hint,
    )


def refused_error(
    meeting: RendezvousRequest, master: Address, error: HandshakeRefused
) -> HandshakeRefused:
    """The error for a rank that rank 0 does not take, or that does not trust who answers there."""
    if isinstance(error, RefusedByPeer):
        what, cause = f"Rank 0 at {master} refused rank {meeting.rank}", error.cause
    else:
        what, cause = f"Rank {meeting.rank} cannot join rank 0 at {master}", error.message
    return HandshakeRefused(
        what, rank=meeting.rank, host=str(master), cause=cause or error.message, hint=error.hint
    )


def unreachable_error(
    meeting: RendezvousRequest, master: Address, error: Exception
) -> DistributedError:
    """The error for a rank that has not met rank 0 in time."""
    cause = error if isinstance(error, DistributedError) else from_os_error("", error)  # type: ignore[arg-type]
    entry = " (peers[0])" if meeting.peers else ""
    return Timeout(
        f"Rank {meeting.rank} could not connect to rank 0 at {master}{entry} "
        f"within {meeting.timeout:g} s",
        seconds=meeting.timeout,
        missing=(0,),
        rank=0,
        host=str(master),
        cause=cause.cause or cause.message,
        hint=cause.hint or "Check that rank 0 runs there and no firewall blocks it.",
    )


# -- rank 0 ----------------------------------------------------------------------------------------


def _gather(meeting: RendezvousRequest) -> tuple[NodePort, Table]:
    arrivals: queue.SimpleQueue[tuple[OpeningSocket, Join]] = queue.SimpleQueue()
    port = _open_port(
        meeting, _listen_as_master(meeting), lambda sock, request: arrivals.put((sock, request))
    )
    waiting: dict[int, OpeningSocket] = {}
    try:
        book = JoinRequested(meeting.world_size)
        _await_everybody(meeting, arrivals, book, waiting)
        me = RankEndpoint(
            hosts=[],
            port=port.port,
            name=machine_name(),
            node=meeting.members.me,
            process=_my_process(meeting),
        )
        peers = book.peers(me)
        ranks = book.waiting().items()
        refused = book.unreachable([k for k, r in ranks if all(map(is_loopback, peers[r].hosts))])
        if refused is not None:
            raise BackendUnavailable(
                "The ranks cannot all reach each other", cause=refused.sentence
            )
        table = Table(session=os.urandom(16), peers=peers)
        for sock in waiting.values():
            with contextlib.suppress(OSError):  # it died this instant; its link will be missed
                sock.settimeout(1.0)
                for part in table.parts(TABLE_PART):
                    answer(sock, part)
    except BaseException as error:
        reason = str(error) if isinstance(error, DistributedError) else "rank 0 has given up"
        for sock in waiting.values():
            refuse(sock, reason)
        _turn_away(port, arrivals, "this rank has given up")
        port.close()
        raise
    _turn_away(port, arrivals, COMPLETE)
    for sock in waiting.values():
        sock.close()
    return port, table


def _refuse_join(sock: OpeningSocket, _: Join) -> None:
    refuse(sock, COMPLETE, for_now=True)


def _open_port(
    meeting: RendezvousRequest, listener: socket.socket, on_join: JoinHandler = _refuse_join
) -> NodePort:
    return NodePort(members=meeting.members, listener=listener, is_shared=True, on_join=on_join)


def _turn_away(
    port: NodePort, arrivals: queue.SimpleQueue[tuple[OpeningSocket, Join]], sentence: str
) -> None:
    """From now on refuse all who want to join, those included who are waiting."""
    port.on_join(lambda sock, _: refuse(sock, sentence, for_now=True))
    with contextlib.suppress(queue.Empty):
        while True:
            refuse(arrivals.get_nowait()[0], sentence, for_now=True)


def _await_everybody(
    meeting: RendezvousRequest,
    arrivals: queue.SimpleQueue[tuple[OpeningSocket, Join]],
    book: JoinRequested,
    waiting: dict[int, OpeningSocket],
) -> None:
    patience: dict[int, float] = {}
    while book.missing:
        if time.monotonic() >= meeting.deadline:
            raise missing_error(meeting, book.missing, "did not join")
        arrived: tuple[OpeningSocket, Join] | None = None
        with contextlib.suppress(queue.Empty):
            left = max(0.0, meeting.deadline - time.monotonic())
            arrived = arrivals.get(timeout=min(WATCH_EVERY, left))
        for key in [key for key, sock in waiting.items() if _has_hung_up(sock)]:
            waiting.pop(key).close()
            book.leave(key)
        for key in [key for key in waiting if time.monotonic() > patience[key]]:
            refuse(waiting.pop(key), f"{list_ranks(book.missing)} did not join in time")
            book.leave(key)
        if arrived is None:
            continue
        sock, request = arrived
        _turn_away_strangers(meeting, book, waiting)  # the caller may have told us of a change
        name = request.peer.name
        refused = judge_entry(request.rank, request.peer, meeting.peers) or book.join(
            id(sock), _as_proved(request, sock)
        )
        if refused is not None:
            logger.warning("refused %r as rank %d: %s", name, request.rank, refused.sentence)
            meeting.members.last_refusal = f"{name!r} was refused: {refused.sentence}"
            refuse(sock, refused.sentence)
        else:
            with contextlib.suppress(OSError):  # it has gone again, which the next look finds
                answer(sock, OpenReply(rank=0))
            waiting[id(sock)] = sock
            # Later than that, so that all hear the same if rank 0 gives up at about that time too.
            patience[id(sock)] = time.monotonic() + request.patience + GRACE / 2


def _turn_away_strangers(
    meeting: RendezvousRequest, book: JoinRequested, waiting: dict[int, OpeningSocket]
) -> None:
    """Refuse those who were members when they came, and are none any more."""
    for key, sock in list(waiting.items()):
        refused = meeting.members.judge_peer(sock.peer) if isinstance(sock, SecureSocket) else None
        if refused is not None:
            rank = book.leave(key)
            logger.warning("refused rank %s, which was waiting: %s", rank, refused.sentence)
            meeting.members.last_refusal = f"Rank {rank} was refused: {refused.sentence}"
            refuse(waiting.pop(key), refused.sentence)


def _has_hung_up(sock: OpeningSocket) -> bool:
    """Whether the peer has closed; neither side sends anything between hello and table."""
    try:
        sock.recv(1, socket.MSG_PEEK)  # select would refuse descriptors above 1023
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _as_proved(request: Join, sock: OpeningSocket) -> Join:
    """The request with the node that TLS has proved, whatever it says itself."""
    node = sock.peer if isinstance(sock, SecureSocket) else NOBODY
    process = request.peer.process
    is_proved = node is NOBODY or process.startswith(f"{node}/")
    peer = structs.replace(shown(request.peer), node=node, process=process if is_proved else "")
    return structs.replace(request, peer=peer)


def _my_process(meeting: RendezvousRequest) -> str:
    node = meeting.members.security.identity.id  # in clear nobody proves it, and it is told too
    return f"{node}/{this_process(node).incarnation}"


def _listen_as_master(meeting: RendezvousRequest) -> socket.socket:
    failure: OSError | None = None
    for master in meeting.masters:
        try:
            return tcp.listen(_bind_host(master.host, mapped=meeting.mapped), master.port)
        except OSError as error:
            failure = error
    assert failure is not None
    where = " or ".join(map(str, meeting.masters))
    raise _listening_error(meeting, where, failure) from failure


def _listening_error(meeting: RendezvousRequest, where: str, failure: OSError) -> DistributedError:
    entry = f" (peers[{meeting.rank}])" if meeting.peers else ""
    what = f"Rank {meeting.rank} could not listen on {where}{entry}"
    if failure.errno != errno.EADDRNOTAVAIL:
        return from_os_error(what, failure, rank=meeting.rank)
    hint = (
        f"This machine does not have this address. Start rank {meeting.rank} on the "
        "machine that has it, or correct the address. If it is behind a port mapping, give this "
        "rank the host 0.0.0.0."
    )
    return from_os_error(what, failure, rank=meeting.rank, hint=hint)


def _bind_host(host: str, *, mapped: bool) -> str:
    """The address to listen on; raises if it is not ours, unless every interface will do then."""
    try:
        resolved = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        if not mapped:
            raise
        return ""
    # A machine's own name often resolves to loopback on itself and to its address elsewhere.
    named_loopback = is_loopback(resolved) and host not in {resolved, "localhost"}
    if named_loopback or ipaddress.ip_address(resolved.partition("%")[0]).is_unspecified:
        return ""
    try:
        tcp.listen(resolved, 0).close()
    except OSError:
        if not mapped:
            raise
        return ""  # behind a port mapping: the address is not on any of our interfaces
    return resolved


# -- the others ------------------------------------------------------------------------------------


def _join(meeting: RendezvousRequest) -> tuple[NodePort, Table]:
    pause, attempt = FIRST_PAUSE, 0
    port = _listen_at(meeting) if meeting.port or meeting.peers else None
    failure: Exception | None = None
    while True:
        master = meeting.masters[attempt % len(meeting.masters)]
        attempt += 1
        try:
            call = OutgoingCall(master, meeting.deadline, ANSWER_WITHIN)
            with contextlib.closing(dial(meeting.members, call)) as sock:
                here = unmapped(sock.getsockname()[0])
                # A machine's own name often means loopback there, and its address elsewhere.
                is_local = master.host == "localhost" or is_loopback(master.host)
                hosts = [here] if is_local else [here, *usable_hosts()]
                if meeting.peers and meeting.peers[meeting.rank].host not in ANYWHERE:
                    hosts = [meeting.peers[meeting.rank].host]
                port = port or _open_port(meeting, tcp.listen(here if is_local else "", 0))
                return port, _ask_to_join(meeting, sock, port.port, hosts)
        except Declined:
            _close(port)
            raise
        except HandshakeRefused as error:
            remaining = meeting.deadline - time.monotonic()
            if isinstance(error, RefusedForNow) and remaining > FULL_PAUSE:
                failure = error
                time.sleep(FULL_PAUSE)
                continue
            _close(port)
            raise refused_error(meeting, master, error) from None
        except (OSError, MalformedFrame) as error:
            remaining = meeting.deadline - time.monotonic()
            if remaining <= 0:
                _close(port)
                raise unreachable_error(meeting, master, failure or error) from error
            failure = error
            time.sleep(min(remaining, pause * random.uniform(0.5, 1.5)))  # noqa: S311 - jitter
            pause = min(LONGEST_PAUSE, pause * 2)
        except BaseException:
            _close(port)
            raise


def _listen_at(meeting: RendezvousRequest) -> NodePort:
    host = meeting.masters[0].host  # a loopback address of ours, or else every interface
    where, port = f"port {meeting.port}", meeting.port
    try:
        if meeting.peers:
            mine = meeting.peers[meeting.rank]
            where, port = str(mine), mine.port
            listener = tcp.listen(_bind_host(mine.host, mapped=False), port)
        else:
            listener = tcp.listen(host if is_loopback(host) else "", port)
    except OSError as error:
        raise _listening_error(meeting, where, error) from error
    return _open_port(meeting, listener)


def _ask_to_join(
    meeting: RendezvousRequest, sock: OpeningSocket, port: int, hosts: list[str]
) -> Table:
    hosts = sorted(dict.fromkeys(hosts), key=is_loopback)[:16]  # what others may reach comes first
    me = RankEndpoint(hosts=hosts, port=port, name=machine_name(), process=_my_process(meeting))
    patience = max(0.0, meeting.deadline - time.monotonic())
    request = Join(meeting.rank, meeting.world_size, me, patience)
    # Something else may listen there, and say nothing; rank 0 answers at once that it knows us.
    soon = time.monotonic() + min(patience, ANSWER_WITHIN)
    say_hello(sock, request, OpenReply, meeting.members, soon)
    table = await_answer(sock, Table, meeting.deadline + GRACE)
    while len(table.peers) < meeting.world_size:
        part = await_answer(sock, Table, meeting.deadline + GRACE)
        if not part.peers:
            break  # there will never be enough of those
        table = Table(table.session, table.peers + part.peers)
    rank_0 = sock.peer if isinstance(sock, SecureSocket) else NOBODY
    proved = {0: rank_0, meeting.rank: meeting.members.me}
    nodes = [peer.node for peer in table.peers]
    if problem := judge_table(nodes, meeting.rank, meeting.world_size, proved):
        raise MalformedFrame(problem)
    for rank in range(1, len(meeting.peers)):
        if refused := judge_entry(rank, table.peers[rank], meeting.peers, meeting.rank):
            raise HandshakeRefused(refused.sentence)
    return Table(table.session, [shown(peer) for peer in table.peers])


def _close(port: NodePort | None) -> None:
    if port is not None:
        port.close()


# --------------------------------------------------------------------------------------------------

formed: list[Callable[[TcpBackend], None]] = []
"""Called with every group that has formed: layers above show it to observers."""


class TcpBackend(StreamBackend):
    """One rank of a group of processes.

    All ranks are given the same ``world_size`` and ``master_addr`` (``host:port``, where rank 0
    listens), and may start in any order within ``timeout`` seconds.  Afterwards every rank has a
    direct connection to every other; rank 0 is nothing special.

    Only members of ``namespace`` can connect, and every byte is encrypted; unless given, it is the
    namespace this machine uses.  ``NetworkNamespace.insecure()`` is plain TCP.

    Ranks other than 0 listen at ``port``, or at any that is free; with ``peers``, the addresses of
    all ranks in their order, each listens at its own.  Rank 0 must be on the machine that has
    ``master_addr``, unless ``mapped`` says that another machine maps this address to it.

    >>> import socket
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with socket.create_server(("127.0.0.1", 0)) as door:
    ...     port = door.getsockname()[1]  # one that is free; usually it is given
    >>> def run(rank):  # in reality, each on a machine of its own
    ...     with TcpBackend(rank, world_size=2, master_addr=f"127.0.0.1:{port}") as backend:
    ...         backend.barrier()
    ...         return backend.rank, backend.world_size
    >>> with ThreadPoolExecutor(2) as machines:
    ...     list(machines.map(run, range(2)))
    [(0, 2), (1, 2)]
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        master_addr: str | Sequence[str],
        *,
        timeout: Seconds = 30,
        namespace: NetworkNamespace | str | None = None,
        port: int = 0,
        peers: Sequence[str] = (),
        mapped: bool = False,
    ) -> None:
        timeout = in_seconds(timeout)
        check_whole(rank, "rank")  # variables of the environment are text
        check_whole(world_size, "world_size")
        if world_size < 2:  # noqa: PLR2004 - one process alone needs no network
            raise InvalidWorldSize(
                world_size, minimum=2, hint="Use SimulatedBackend for a single process."
            )
        if not 0 <= rank < world_size:
            raise InvalidRank(rank, world_size)
        masters = [master_addr] if isinstance(master_addr, str) else master_addr
        meeting = RendezvousRequest(
            rank,
            world_size,
            [parse_address(text) for text in masters],
            timeout,
            time.monotonic() + timeout,
            TrustStore.load(namespace),
            port,
            [parse_address(text) for text in peers],
            mapped,
        )
        self._meeting = meeting
        port_here, self._table = _gather(meeting) if rank == 0 else _join(meeting)
        try:
            super().__init__(port_here, self._table.session, rank, self._endpoints())
            self._form(meeting.deadline, lambda: None, is_fixed=True)
        except BaseException:
            port_here.close()
            raise
        for follow in formed:
            follow(self)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        timeout: Seconds = 30,
        namespace: NetworkNamespace | str | None = None,
    ) -> Self:
        """Join as ``torchrun``, ``mpirun`` or ``srun`` tell this process to."""
        launch = read_launch(os.environ if environ is None else environ)
        return cls(
            launch.rank,
            launch.world_size,
            launch.masters,
            timeout=timeout,
            namespace=namespace,
            mapped=True,
        )

    @property
    def table(self) -> Table:
        """Who is who in this group, as rank 0 has written it down."""
        return self._table

    def _endpoints(self) -> list[RankEndpoint]:
        """Where every rank is; rank 0 does not know by which address others reach it."""
        peers = list(self._table.peers)
        masters = list(dict.fromkeys(master.host for master in self._meeting.masters))
        peers[0] = structs.replace(peers[0], hosts=peers[0].hosts or masters)
        return peers

    def _incomplete(
        self, missing: Sequence[int], failures: Mapping[int, DistributedError]
    ) -> DistributedError:
        refused = [failures[rank] for rank in missing if rank in failures]
        return refused[0] if refused else missing_error(self._meeting, missing, "did not connect")

    def _check_rank(self, rank: int) -> int:
        if super()._check_rank(rank) == self.rank:
            raise SelfSend(rank)
        return rank

    def close(self) -> None:
        """Leave the group and stop listening."""
        if self._closed is None:
            super().close()
            self._clear_switchboard()
        self._port.close()
