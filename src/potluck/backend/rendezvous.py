"""Meeting at rank 0: every rank learns where all others are, then the mesh is dialled.

Rank 0 listens at the master address.  The others dial it, in any order and as often as needed,
say who and where they are, and get the table when everybody has come.  Then each rank dials those
below it and is dialled by those above.  A rank that is refused is told why; nobody else notices.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import socket
import time

from msgspec import structs

from potluck.backend.dialling import (
    Door,
    Links,
    Meeting,
    Welcome,
    missing_error,
    refused_error,
    shown,
    unreachable_error,
)
from potluck.backend.introduction import Call, Declined, dial, say_hello
from potluck.core.handshake import ANYWHERE, Rendezvous, judge_entry, judge_table, list_ranks
from potluck.errors import (
    BackendUnavailable,
    DistributedError,
    HandshakeRefused,
    MalformedFrame,
    from_os_error,
)
from potluck.logs import get_logger
from potluck.messages import Join, LaneOpened, Peer, Table
from potluck.net import tcp
from potluck.net.addresses import is_loopback, unmapped, usable_hosts
from potluck.net.incarnation import this_process
from potluck.net.names import machine_name
from potluck.net.opening import RefusedForNow, answer, await_answer, refuse
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.security import NOBODY

__all__ = ["meet"]

logger = get_logger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two attempts to reach rank 0: doubling, with jitter so that ranks spread out."""

FULL_PAUSE = 0.25
"""Seconds until a group that was complete is asked again: an earlier one may be about to leave."""

WATCH_EVERY = 0.05
"""Seconds between two looks at whether somebody who waits has hung up."""

ANSWER_WITHIN = 2.0
"""Seconds after which whoever listens at the master address is taken to be somebody else."""

TABLE_PART = 1 << 15
"""Bytes of the table in one frame: half of what fits, as a single peer may take a quarter."""

GRACE = 1.0
"""Seconds a rank whose time is up still listens to rank 0, which knows who is missing."""


def meet(meeting: Meeting, welcome: Welcome) -> Links:
    """Take part; ``welcome`` gets every peer's connection."""
    door, table = gather(meeting) if meeting.rank == 0 else join(meeting)
    try:
        links = Links(meeting, table, door, welcome)
        links.dial_lower()
        links.await_higher()
    except BaseException:
        door.close()
        raise
    return links


# -- rank 0 ----------------------------------------------------------------------------------------


def gather(meeting: Meeting) -> tuple[Door, Table]:
    door = Door(_listen_as_master(meeting), meeting.members)
    waiting: dict[int, OpeningSocket] = {}
    try:
        book = Rendezvous(meeting.world_size)
        _await_everybody(meeting, door, book, waiting)
        me = Peer(
            hosts=[],
            port=door.acceptor.port,
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
        door.close()
        raise
    for sock in waiting.values():
        sock.close()
    return door, table


def _await_everybody(
    meeting: Meeting, door: Door, book: Rendezvous, waiting: dict[int, OpeningSocket]
) -> None:
    patience: dict[int, float] = {}
    while book.missing:
        if time.monotonic() >= meeting.deadline:
            raise missing_error(meeting, book.missing, "did not come to the rendezvous")
        hello = door.next_hello(min(meeting.deadline, time.monotonic() + WATCH_EVERY))
        for key in [key for key, sock in waiting.items() if _has_hung_up(sock)]:
            waiting.pop(key).close()
            book.leave(key)
        for key in [key for key in waiting if time.monotonic() > patience[key]]:
            refuse(waiting.pop(key), f"{list_ranks(book.missing)} did not come in time")
            book.leave(key)
        if hello is None:
            continue
        sock, request = hello
        if not isinstance(request, Join):
            refuse(sock, "the group is not complete yet")
            continue
        _turn_away_strangers(meeting, book, waiting)  # the caller may have told us of a change
        name = request.peer.name
        refused = judge_entry(request.rank, request.peer, meeting.peers) or book.join(
            id(sock), _as_proved(request, sock)
        )
        if refused is not None:
            logger.warning("refused %r as rank %d: %s", name, request.rank, refused.sentence)
            meeting.members.last_refusal = f"{name!r} was turned away: {refused.sentence}"
            refuse(sock, refused.sentence)
        else:
            with contextlib.suppress(OSError):  # it has gone again, which the next look finds
                answer(sock, LaneOpened(rank=0))
            waiting[id(sock)] = sock
            # Later than that, so that all hear the same if rank 0 gives up at about that time too.
            patience[id(sock)] = time.monotonic() + request.patience + GRACE / 2


def _turn_away_strangers(
    meeting: Meeting, book: Rendezvous, waiting: dict[int, OpeningSocket]
) -> None:
    """Refuse those who were members when they came, and are none any more."""
    for key, sock in list(waiting.items()):
        refused = meeting.members.judge_peer(sock.peer) if isinstance(sock, SecureSocket) else None
        if refused is not None:
            rank = book.leave(key)
            logger.warning("refused rank %s, which was waiting: %s", rank, refused.sentence)
            meeting.members.last_refusal = f"Rank {rank} was turned away: {refused.sentence}"
            refuse(waiting.pop(key), refused.sentence)


def _has_hung_up(sock: OpeningSocket) -> bool:
    """Whether the peer has closed; nobody says anything between hello and table."""
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


def _my_process(meeting: Meeting) -> str:
    node = meeting.members.security.identity.id  # in clear nobody proves it, and it is told too
    return f"{node}/{this_process(node).incarnation}"


def _listen_as_master(meeting: Meeting) -> socket.socket:
    failure: OSError | None = None
    for master in meeting.masters:
        try:
            return tcp.listen(_bind_host(master.host, mapped=meeting.mapped), master.port)
        except OSError as error:
            failure = error
    assert failure is not None
    where = " or ".join(map(str, meeting.masters))
    raise _listening_error(meeting, where, failure) from failure


def _listening_error(meeting: Meeting, where: str, failure: OSError) -> DistributedError:
    entry = f" (peers[{meeting.rank}])" if meeting.peers else ""
    what = f"Rank {meeting.rank} could not listen on {where}{entry}"
    if failure.errno != errno.EADDRNOTAVAIL:
        return from_os_error(what, failure, rank=meeting.rank)
    hint = (
        f"This address belongs to no interface of this machine. Start rank {meeting.rank} on the "
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


def join(meeting: Meeting) -> tuple[Door, Table]:
    pause, attempt = FIRST_PAUSE, 0
    door = _listen_at(meeting) if meeting.port or meeting.peers else None
    failure: Exception | None = None
    while True:
        master = meeting.masters[attempt % len(meeting.masters)]
        attempt += 1
        try:
            call = Call(master, meeting.deadline, ANSWER_WITHIN)
            with contextlib.closing(dial(meeting.members, call)) as sock:
                here = unmapped(sock.getsockname()[0])
                # A machine's own name often means loopback there, and its address elsewhere.
                is_local = master.host == "localhost" or is_loopback(master.host)
                hosts = [here] if is_local else [here, *usable_hosts()]
                if meeting.peers and meeting.peers[meeting.rank].host not in ANYWHERE:
                    hosts = [meeting.peers[meeting.rank].host]
                door = door or Door(tcp.listen(here if is_local else "", 0), meeting.members)
                return door, _ask_to_join(meeting, sock, door.acceptor.port, hosts)
        except Declined:
            _close(door)
            raise
        except HandshakeRefused as error:
            remaining = meeting.deadline - time.monotonic()
            if isinstance(error, RefusedForNow) and remaining > FULL_PAUSE:
                failure = error
                time.sleep(FULL_PAUSE)
                continue
            _close(door)
            raise refused_error(meeting, master, error) from None
        except (OSError, MalformedFrame) as error:
            remaining = meeting.deadline - time.monotonic()
            if remaining <= 0:
                _close(door)
                raise unreachable_error(meeting, master, failure or error) from error
            failure = error
            time.sleep(min(remaining, pause * random.uniform(0.5, 1.5)))  # noqa: S311 - jitter
            pause = min(LONGEST_PAUSE, pause * 2)
        except BaseException:
            _close(door)
            raise


def _listen_at(meeting: Meeting) -> Door:
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
    return Door(listener, meeting.members)


def _ask_to_join(meeting: Meeting, sock: OpeningSocket, port: int, hosts: list[str]) -> Table:
    hosts = sorted(dict.fromkeys(hosts), key=is_loopback)[:16]  # what others may reach comes first
    me = Peer(hosts=hosts, port=port, name=machine_name(), process=_my_process(meeting))
    patience = max(0.0, meeting.deadline - time.monotonic())
    request = Join(meeting.rank, meeting.world_size, me, patience)
    # Something else may listen there, and say nothing; rank 0 answers at once that it knows us.
    soon = time.monotonic() + min(patience, ANSWER_WITHIN)
    say_hello(sock, request, LaneOpened, meeting.members, soon)
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


def _close(door: Door | None) -> None:
    if door is not None:
        door.close()
