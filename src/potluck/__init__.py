"""Train together on the machines you already own.

Ranks exchange bytes through a :class:`Backend`; any object with the buffer protocol is sent without
a copy and received in place.

>>> from potluck import SimulatedBackend
>>> left, right = SimulatedBackend.create_group(2)
>>> left.send(b"soup", dst=1)
>>> dish = bytearray(4)
>>> right.recv(dish, src=0)
>>> dish
bytearray(b'soup')

Across machines it is ``TcpBackend(rank, world_size, "192.168.1.10:29500")``, one per process.
Everything public is listed in ``__all__``.  Importing the package starts and opens nothing; the
backends are loaded when first named.
"""

import typing as _typing
from importlib import import_module as _import_module

from potluck.errors import (
    BackendUnavailable,
    ChannelClosed,
    CollectiveMismatch,
    Disconnected,
    DistributedError,
    HandshakeRefused,
    InvalidRank,
    InvalidWorldSize,
    IoError,
    MalformedFrame,
    NoConnection,
    PeerLost,
    SelfSend,
    SizeMismatch,
    Timeout,
    UnsupportedOperation,
)

if _typing.TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.backend.operation import Operation
    from potluck.backend.simulated import SimulatedBackend, SimulatedFaults
    from potluck.backend.sub import SubBackend
    from potluck.backend.tcp import TcpBackend
    from potluck.collective.config import CollectiveConfig
    from potluck.collective.strategies import AllReduceStrategy, BroadcastStrategy, ReduceStrategy
    from potluck.net.identity import NodeIdentity
    from potluck.net.namespace import NetworkNamespace, SecurityWarning

__version__ = "0.1.0"

__all__ = [
    "AllReduceStrategy",
    "Backend",
    "BackendUnavailable",
    "BroadcastStrategy",
    "ChannelClosed",
    "CollectiveConfig",
    "CollectiveMismatch",
    "Disconnected",
    "DistributedError",
    "HandshakeRefused",
    "InvalidRank",
    "InvalidWorldSize",
    "IoError",
    "MalformedFrame",
    "NetworkNamespace",
    "NoConnection",
    "NodeIdentity",
    "Operation",
    "PeerLost",
    "ReduceStrategy",
    "SecurityWarning",
    "SelfSend",
    "SimulatedBackend",
    "SimulatedFaults",
    "SizeMismatch",
    "SubBackend",
    "TcpBackend",
    "Timeout",
    "UnsupportedOperation",
]

# Where the names live that are loaded when first used; tests/test_exports.py compares this with the
# imports for type checkers above.
_HOMES = {
    "AllReduceStrategy": "potluck.collective.strategies",
    "Backend": "potluck.backend.base",
    "BroadcastStrategy": "potluck.collective.strategies",
    "CollectiveConfig": "potluck.collective.config",
    "NetworkNamespace": "potluck.net.namespace",
    "NodeIdentity": "potluck.net.identity",
    "Operation": "potluck.backend.operation",
    "ReduceStrategy": "potluck.collective.strategies",
    "SecurityWarning": "potluck.net.namespace",
    "SimulatedBackend": "potluck.backend.simulated",
    "SimulatedFaults": "potluck.backend.simulated",
    "SubBackend": "potluck.backend.sub",
    "TcpBackend": "potluck.backend.tcp",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
