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

Together they add up arrays, and whatever else a training needs; a :class:`DistributedContext` is
the handle for that, on any backend.

>>> from potluck import DistributedContext
>>> contexts = [DistributedContext(backend) for backend in (left, right)]
>>> works = [each.all_reduce(each.rank + 0.5, async_op=True) for each in contexts]
>>> [work.wait() for work in works]
[2.0, 2.0]
>>> for each in contexts: each.close()

Across machines it is ``TcpBackend(rank, world_size, "192.168.1.10:29500")``, one per process.
Everything public is listed in ``__all__``.  Importing the package starts and opens nothing; the
backends are loaded when first named.
"""

import os as _os
import typing as _typing
from importlib import import_module as _import_module

from potluck._version import __version__ as __version__
from potluck.errors import (
    Aborted,
    BackendUnavailable,
    ChannelClosed,
    CollectiveMismatch,
    Disconnected,
    DistributedError,
    HandshakeRefused,
    InvalidRank,
    InvalidWorldSize,
    IoError,
    LeftOut,
    MalformedFrame,
    NoConnection,
    NoQuorum,
    PeerLost,
    SelfSend,
    SizeMismatch,
    Timeout,
    UnsupportedOperation,
    ViewChanged,
)

if _typing.TYPE_CHECKING:
    from potluck._types import ProcessId, View
    from potluck.backend.adapters.hybrid import HybridBackend
    from potluck.backend.adapters.mpi import MpiBackend
    from potluck.backend.adapters.torch import TorchBackend
    from potluck.backend.base import Backend
    from potluck.backend.operation import Operation
    from potluck.backend.simulated import SimulatedBackend, SimulatedFaults
    from potluck.backend.sub import SubBackend
    from potluck.backend.tcp import TcpBackend
    from potluck.cluster.cluster import AutoDiscoveryBackend, Cluster, join
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.events import ClusterEvent, ViewChange
    from potluck.cluster.metrics_endpoint import MetricsCollector, MetricsEndpoint
    from potluck.cluster.topology import SharedTopology
    from potluck.collective.call import Work
    from potluck.collective.collectives import DistributedBackend
    from potluck.collective.context import (
        DistributedConfig,
        DistributedContext,
        RingBackend,
        all_gather,
        all_reduce,
        all_to_all,
        allreduce,
        barrier,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
    from potluck.compression.compressor import CompressedGradient, GradientCompressor
    from potluck.compression.strategy import CompressionStrategy, QuantizationType
    from potluck.identity.namespace import NetworkNamespace, SecurityWarning
    from potluck.identity.node import NodeIdentity
    from potluck.membership.election import ElectionManager
    from potluck.membership.events import (
        ElectionConfig,
        ElectionEvent,
        ElectionKind,
        ElectionRole,
        ElectionState,
    )
    from potluck.membership.health import (
        HealthConfig,
        HealthEvent,
        HealthMonitor,
        HealthStatus,
        HealthSummary,
    )
    from potluck.membership.topology import ClusterTopology, ConnectionProfile, NodeProfile
    from potluck.metrics.registry import DistributedMetrics, MetricsSnapshot, SharedMetrics
    from potluck.rpc.agent import RpcAgent, TcpRpcBackend
    from potluck.rpc.calls import RpcConfig, RpcFuture
    from potluck.rpc.errors import (
        RpcBusy,
        RpcCancelled,
        RpcError,
        RpcFunctionNotFound,
        RpcInternal,
        RpcInvalidMessage,
        RpcNoConnection,
        RpcRemoteError,
        RpcTimeout,
        RpcTooLarge,
    )
    from potluck.schedule.planner import CollectiveConfig
    from potluck.schedule.reduce import ReduceOp
    from potluck.schedule.task import (
        AllReduceStrategy,
        BroadcastStrategy,
        ReduceStrategy,
    )
    from potluck.training.averaging import DiscardedWork, StepOutcome
    from potluck.training.checkpoint import Checkpointer
    from potluck.training.checkpoint_files import Checkpoint
    from potluck.training.elastic import ElasticTrainer
    from potluck.training.local_sgd import LocalSgd
    from potluck.training.sampler import ElasticSampler
    from potluck.training.state import TrainingState

__all__ = [
    "Aborted",
    "AllReduceStrategy",
    "AutoDiscoveryBackend",
    "AutoDiscoveryConfig",
    "Backend",
    "BackendUnavailable",
    "BroadcastStrategy",
    "ChannelClosed",
    "Checkpoint",
    "Checkpointer",
    "Cluster",
    "ClusterEvent",
    "ClusterTopology",
    "CollectiveConfig",
    "CollectiveMismatch",
    "CompressedGradient",
    "CompressionStrategy",
    "ConnectionProfile",
    "DiscardedWork",
    "Disconnected",
    "DistributedBackend",
    "DistributedConfig",
    "DistributedContext",
    "DistributedError",
    "DistributedMetrics",
    "ElasticSampler",
    "ElasticTrainer",
    "ElectionConfig",
    "ElectionEvent",
    "ElectionKind",
    "ElectionManager",
    "ElectionRole",
    "ElectionState",
    "GradientCompressor",
    "HandshakeRefused",
    "HealthConfig",
    "HealthEvent",
    "HealthMonitor",
    "HealthStatus",
    "HealthSummary",
    "HybridBackend",
    "InvalidRank",
    "InvalidWorldSize",
    "IoError",
    "LeftOut",
    "LocalSgd",
    "MalformedFrame",
    "MetricsCollector",
    "MetricsEndpoint",
    "MetricsSnapshot",
    "MpiBackend",
    "NetworkNamespace",
    "NoConnection",
    "NoQuorum",
    "NodeIdentity",
    "NodeProfile",
    "Operation",
    "PeerLost",
    "ProcessId",
    "QuantizationType",
    "ReduceOp",
    "ReduceStrategy",
    "RingBackend",
    "RpcAgent",
    "RpcBusy",
    "RpcCancelled",
    "RpcConfig",
    "RpcError",
    "RpcFunctionNotFound",
    "RpcFuture",
    "RpcInternal",
    "RpcInvalidMessage",
    "RpcNoConnection",
    "RpcRemoteError",
    "RpcTimeout",
    "RpcTooLarge",
    "SecurityWarning",
    "SelfSend",
    "SharedMetrics",
    "SharedTopology",
    "SimulatedBackend",
    "SimulatedFaults",
    "SizeMismatch",
    "StepOutcome",
    "SubBackend",
    "TcpBackend",
    "TcpRpcBackend",
    "Timeout",
    "TorchBackend",
    "TrainingState",
    "UnsupportedOperation",
    "View",
    "ViewChange",
    "ViewChanged",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allreduce",
    "barrier",
    "broadcast",
    "gather",
    "join",
    "reduce",
    "reduce_scatter",
    "scatter",
]

# Where the names live that are loaded when first used; tests/test_exports.py compares this with the
# imports for type checkers above.
_HOMES = {
    "AllReduceStrategy": "potluck.schedule.task",
    "AutoDiscoveryBackend": "potluck.cluster.cluster",
    "AutoDiscoveryConfig": "potluck.cluster.config",
    "Backend": "potluck.backend.base",
    "BroadcastStrategy": "potluck.schedule.task",
    "Checkpoint": "potluck.training.checkpoint_files",
    "Checkpointer": "potluck.training.checkpoint",
    "Cluster": "potluck.cluster.cluster",
    "ClusterEvent": "potluck.cluster.events",
    "ClusterTopology": "potluck.membership.topology",
    "CollectiveConfig": "potluck.schedule.planner",
    "CompressedGradient": "potluck.compression.compressor",
    "CompressionStrategy": "potluck.compression.strategy",
    "ConnectionProfile": "potluck.membership.topology",
    "DiscardedWork": "potluck.training.averaging",
    "DistributedBackend": "potluck.collective.collectives",
    "DistributedConfig": "potluck.collective.context",
    "DistributedContext": "potluck.collective.context",
    "DistributedMetrics": "potluck.metrics.registry",
    "ElasticSampler": "potluck.training.sampler",
    "ElasticTrainer": "potluck.training.elastic",
    "ElectionConfig": "potluck.membership.events",
    "ElectionEvent": "potluck.membership.events",
    "ElectionKind": "potluck.membership.events",
    "ElectionManager": "potluck.membership.election",
    "ElectionRole": "potluck.membership.events",
    "ElectionState": "potluck.membership.events",
    "GradientCompressor": "potluck.compression.compressor",
    "HealthConfig": "potluck.membership.health",
    "HealthEvent": "potluck.membership.health",
    "HealthMonitor": "potluck.membership.health",
    "HealthStatus": "potluck.membership.health",
    "HealthSummary": "potluck.membership.health",
    "HybridBackend": "potluck.backend.adapters.hybrid",
    "LocalSgd": "potluck.training.local_sgd",
    "MetricsCollector": "potluck.cluster.metrics_endpoint",
    "MetricsEndpoint": "potluck.cluster.metrics_endpoint",
    "MetricsSnapshot": "potluck.metrics.registry",
    "MpiBackend": "potluck.backend.adapters.mpi",
    "NetworkNamespace": "potluck.identity.namespace",
    "NodeIdentity": "potluck.identity.node",
    "NodeProfile": "potluck.membership.topology",
    "Operation": "potluck.backend.operation",
    "ProcessId": "potluck._types",
    "QuantizationType": "potluck.compression.strategy",
    "ReduceOp": "potluck.schedule.reduce",
    "ReduceStrategy": "potluck.schedule.task",
    "RingBackend": "potluck.collective.context",
    "RpcAgent": "potluck.rpc.agent",
    "RpcBusy": "potluck.rpc.errors",
    "RpcCancelled": "potluck.rpc.errors",
    "RpcConfig": "potluck.rpc.calls",
    "RpcError": "potluck.rpc.errors",
    "RpcFunctionNotFound": "potluck.rpc.errors",
    "RpcFuture": "potluck.rpc.calls",
    "RpcInternal": "potluck.rpc.errors",
    "RpcInvalidMessage": "potluck.rpc.errors",
    "RpcNoConnection": "potluck.rpc.errors",
    "RpcRemoteError": "potluck.rpc.errors",
    "RpcTimeout": "potluck.rpc.errors",
    "RpcTooLarge": "potluck.rpc.errors",
    "SecurityWarning": "potluck.identity.namespace",
    "SharedMetrics": "potluck.metrics.registry",
    "SharedTopology": "potluck.cluster.topology",
    "SimulatedBackend": "potluck.backend.simulated",
    "SimulatedFaults": "potluck.backend.simulated",
    "StepOutcome": "potluck.training.averaging",
    "SubBackend": "potluck.backend.sub",
    "TcpBackend": "potluck.backend.tcp",
    "TcpRpcBackend": "potluck.rpc.agent",
    "TorchBackend": "potluck.backend.adapters.torch",
    "TrainingState": "potluck.training.state",
    "View": "potluck._types",
    "ViewChange": "potluck.cluster.events",
    "Work": "potluck.collective.call",
    "all_gather": "potluck.collective.context",
    "all_reduce": "potluck.collective.context",
    "all_to_all": "potluck.collective.context",
    "allreduce": "potluck.collective.context",
    "barrier": "potluck.collective.context",
    "broadcast": "potluck.collective.context",
    "gather": "potluck.collective.context",
    "join": "potluck.cluster.cluster",
    "reduce": "potluck.collective.context",
    "reduce_scatter": "potluck.collective.context",
    "scatter": "potluck.collective.context",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    if name == "TcpBackend":
        _import_module("potluck.cluster.presence")  # shows its groups to `potluck status`
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if "POTLUCK_LAST_WORDS" in _os.environ:  # started by `potluck run`, which asks why a script failed
    _import_module("potluck.launch_env").install()
