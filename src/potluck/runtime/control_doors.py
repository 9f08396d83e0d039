"""Opening control lanes: what is said at the door, on both sides, and who is let in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from potluck.backend.port import NodePort, proved_node
from potluck.core.cluster_cards import ProcessCard, Role
from potluck.core.topology_nodes import NodeProfile
from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame
from potluck.messages import Control, ControlOpened, pack, unpack
from potluck.net.addresses import Address, unmapped
from potluck.net.discovery_records import job_tag
from potluck.net.opening import refuse
from potluck.net.secure_socket import OpeningSocket
from potluck.net.security import NOBODY
from potluck.runtime.control_errands import link_address
from potluck.runtime.control_lanes import OpenedLane
from potluck.runtime.io_lane import Lane
from potluck.vocabulary import NodeId, ProcessId

__all__ = ["SAME_PROCESS", "Doors"]

SAME_PROCESS = "this is the same process"
"""How one learns that an address is one's own."""

DIAL_WITHIN = 6.0
"""Seconds for one attempt, all its addresses and the handshake included."""


class Doors:
    """Opens lanes for one process and job: dials, and answers who dials.

    Observers may look at any job of the namespace; None stands for all.
    """

    def __init__(
        self,
        port: NodePort,
        job: str | None,
        card: ProcessCard,
        receive: Callable[[OpenedLane], None],
        objection: Callable[[ProcessId], str | None] = lambda _: None,
        *,
        profile: NodeProfile | None = None,
    ) -> None:
        self._profile = profile.to_bytes() if profile else b""
        self._port = port
        self._job_name = job
        self.card = card
        self._receive = receive
        self._objection = objection
        port.on_control(self._answer)

    @property
    def job_tag(self) -> str:
        """Stands for the job, or for all of them; follows the secret of the namespace."""
        namespace = self._port.members.security.namespace
        return "" if self._job_name is None else job_tag(namespace, self._job_name)

    # -- dialling: on errands ------------------------------------------------------------------

    def dial(
        self, addresses: Sequence[Address], expected: NodeId | None, look: Callable[[], None]
    ) -> OpenedLane:
        """Open a lane; raises ``DistributedError`` or ``OSError``."""
        hello = Control(job=self.job_tag, card=pack(self.card), profile=self._profile)
        deadline = time.monotonic() + DIAL_WITHIN
        sock, answer = self._port.dial_control(addresses, expected, hello, deadline, look)
        try:
            card, profile = self._read_card(sock, answer), _read_profile(answer)
            return self._opened(sock, card, self.card.process, profile)
        except BaseException:
            sock.close()
            raise

    # -- answering: on the thread of the port --------------------------------------------------

    def _answer(self, sock: OpeningSocket, hello: Control) -> None:
        try:
            card, profile = self._read_card(sock, hello), _read_profile(hello)
        except (HandshakeRefused, MalformedFrame) as error:
            refuse(sock, error.message)
            return
        if objection := self._objection(card.process):
            refuse(sock, objection, for_now=True)
            return
        answer = ControlOpened(job=self.job_tag, card=pack(self.card), profile=self._profile)
        self._port.answer_control(sock, answer)
        self._receive(self._opened(sock, card, card.process, profile))

    # -- both ----------------------------------------------------------------------------------

    def _read_card(self, sock: OpeningSocket, said: Control | ControlOpened) -> ProcessCard:
        """What the other side says of itself, if it fits what it has proved."""
        card = unpack(said.card, ProcessCard)
        proved = proved_node(sock)
        introduction = said.introduction
        if card.process == self.card.process:
            raise HandshakeRefused(SAME_PROCESS)
        if said.job != self.job_tag and Role.OBSERVER not in {card.role, self.card.role}:
            raise HandshakeRefused("this process works on another job")
        if proved is not NOBODY and proved != card.node:
            raise HandshakeRefused("its card names another node than it has proved to be")
        if introduction.incarnation != card.incarnation:
            raise HandshakeRefused("its card is that of another start of its process")
        if introduction.machine:
            card = msgspec.structs.replace(
                card,
                machine=introduction.machine,
                boot=introduction.boot,
                slot=introduction.slot,
            )
        return card

    def _opened(
        self,
        sock: OpeningSocket,
        card: ProcessCard,
        dialler: ProcessId,
        profile: NodeProfile | None,
    ) -> OpenedLane:
        host, port = sock.getpeername()[:2]
        host = unmapped(str(host))
        address = Address(host, card.port or int(port))
        link = None
        with contextlib.suppress(OSError, DistributedError):
            link = link_address(host)
        lane = Lane(sock, f"{card} at {address}")
        return OpenedLane(lane, card, dialler, address, link, profile)


def _read_profile(said: Control | ControlOpened) -> NodeProfile | None:
    return NodeProfile.from_bytes(said.profile) if said.profile else None
