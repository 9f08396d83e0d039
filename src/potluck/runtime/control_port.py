"""The port of a process, and the card on which it says who it is."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from potluck.backend.port import NodePort
from potluck.core.cluster_cards import ProcessCard, Role
from potluck.errors import IoError
from potluck.logs import get_logger
from potluck.net import tcp
from potluck.net.addresses import interfaces, usable_hosts
from potluck.net.discovery_config import DEFAULT_PORT

if TYPE_CHECKING:
    from potluck.runtime.auto_config import AutoDiscoveryConfig

__all__ = ["make_card", "open_port"]

logger = get_logger("potluck.cluster")

USUAL_PORTS = 16
"""Ports that are tried before any free one will do."""


def open_port(
    config: AutoDiscoveryConfig, rendezvous: int | None = None, *, is_shared: bool = False
) -> NodePort:
    """The port of this process: the one that is wanted, a usual one, or any that is free."""

    def opened(number: int) -> NodePort:
        return NodePort(config.namespace, port=number, host=config.host, is_shared=is_shared)

    wanted = config.port or rendezvous or 0
    if wanted:
        return opened(wanted)
    wished = config.wished_port
    usual = range(DEFAULT_PORT, DEFAULT_PORT + USUAL_PORTS)
    for number in (*((wished,) if wished else ()), *usual):
        if _is_free(config.host, number):
            with contextlib.suppress(IoError):  # somebody was faster
                return opened(number)
    return opened(0)


def _is_free(host: str, port: int) -> bool:
    try:
        tcp.listen(host, port).close()
    except OSError:
        return False
    return True


def make_card(port: NodePort, config: AutoDiscoveryConfig, role: Role) -> ProcessCard:
    """What this process says of itself."""
    introduction = port.introduction()
    hosts = [config.host] if config.host else _hosts(config)
    return ProcessCard(
        node=port.process.node,
        incarnation=port.process.incarnation,
        slot=port.slot,
        machine=introduction.machine,
        boot=introduction.boot,
        name=config.node_name,
        hosts=tuple(hosts[:16]) or ("127.0.0.1",),  # without a network, for this machine alone
        port=port.port,
        role=role,
        schema=config.schema,
        pause_after=config.health.pause_after,
        quorum=config.quorum,
        place=config.wished_rank,
    )


def _hosts(config: AutoDiscoveryConfig) -> list[str]:
    """Where others can reach this machine."""
    wanted = config.discovery().interfaces
    hosts = usable_hosts(virtual=config.virtual, only=wanted)
    if wanted and not hosts:
        names = ", ".join(sorted({each.name for each in interfaces()}))
        logger.warning(
            "Nobody on other machines can reach this node: the interface %s is not there, or "
            "has no address for them. This machine has: %s.",
            " or ".join(wanted),
            names or "none",
        )
    return hosts
