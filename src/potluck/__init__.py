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
    from potluck.backend.base import Backend
    from potluck.backend.engines.hybrid import HybridBackend
    from potluck.backend.engines.mpi import MpiBackend
    from potluck.backend.engines.torch import TorchBackend
    from potluck.backend.operation import Operation
    from potluck.backend.simulated import SimulatedBackend, SimulatedFaults
    from potluck.backend.sub import SubBackend
    from potluck.backend.tcp import TcpBackend
    from potluck.collective.compression.compressor import GradientCompressor
    from potluck.collective.compression.packing import CompressedGradient
    from potluck.collective.compression.strategy import CompressionStrategy, QuantizationType
    from potluck.collective.config import CollectiveConfig
    from potluck.collective.reduce import ReduceOp
    from potluck.collective.strategies import AllReduceStrategy, BroadcastStrategy, ReduceStrategy
    from potluck.core.calls_errors import (
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
    from potluck.core.election import ElectionManager
    from potluck.core.election_events import (
        ElectionConfig,
        ElectionEvent,
        ElectionKind,
        ElectionRole,
        ElectionState,
    )
    from potluck.core.health import HealthMonitor
    from potluck.core.health_config import HealthConfig
    from potluck.core.health_records import HealthEvent, HealthStatus, HealthSummary
    from potluck.core.topology import ClusterTopology
    from potluck.core.topology_links import ConnectionProfile
    from potluck.core.topology_nodes import NodeProfile
    from potluck.metrics import DistributedMetrics, MetricsSnapshot, SharedMetrics
    from potluck.net.identity import NodeIdentity
    from potluck.net.namespace import NetworkNamespace, SecurityWarning
    from potluck.runtime.auto import AutoDiscoveryBackend
    from potluck.runtime.auto_config import AutoDiscoveryConfig
    from potluck.runtime.cluster import Cluster
    from potluck.runtime.cluster_events import ClusterEvent, ViewChange
    from potluck.runtime.config import DistributedConfig
    from potluck.runtime.context import DistributedContext
    from potluck.runtime.distributed import DistributedBackend
    from potluck.runtime.functions import (
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
    from potluck.runtime.joining import join
    from potluck.runtime.metrics_endpoint import MetricsEndpoint
    from potluck.runtime.metrics_exposition import MetricsCollector
    from potluck.runtime.ring import RingBackend
    from potluck.runtime.rpc import RpcAgent
    from potluck.runtime.rpc_calls import RpcFuture
    from potluck.runtime.rpc_config import RpcConfig
    from potluck.runtime.rpc_tcp import TcpRpcBackend
    from potluck.runtime.topology import SharedTopology
    from potluck.runtime.work import Work
    from potluck.training.checkpoint import Checkpointer
    from potluck.training.checkpoint_reading import Checkpoint
    from potluck.training.elastic import ElasticTrainer
    from potluck.training.elastic_outcome import DiscardedWork, StepOutcome
    from potluck.training.local_sgd import LocalSgd
    from potluck.training.sampler import ElasticSampler
    from potluck.training.state import TrainingState
    from potluck.vocabulary import ProcessId, View

__version__ = "0.1.0"

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
    "AllReduceStrategy": "potluck.collective.strategies",
    "AutoDiscoveryBackend": "potluck.runtime.auto",
    "AutoDiscoveryConfig": "potluck.runtime.auto_config",
    "Backend": "potluck.backend.base",
    "BroadcastStrategy": "potluck.collective.strategies",
    "Checkpoint": "potluck.training.checkpoint_reading",
    "Checkpointer": "potluck.training.checkpoint",
    "Cluster": "potluck.runtime.cluster",
    "ClusterEvent": "potluck.runtime.cluster_events",
    "ClusterTopology": "potluck.core.topology",
    "CollectiveConfig": "potluck.collective.config",
    "CompressedGradient": "potluck.collective.compression.packing",
    "CompressionStrategy": "potluck.collective.compression.strategy",
    "ConnectionProfile": "potluck.core.topology_links",
    "DiscardedWork": "potluck.training.elastic_outcome",
    "DistributedBackend": "potluck.runtime.distributed",
    "DistributedConfig": "potluck.runtime.config",
    "DistributedContext": "potluck.runtime.context",
    "DistributedMetrics": "potluck.metrics",
    "ElasticSampler": "potluck.training.sampler",
    "ElasticTrainer": "potluck.training.elastic",
    "ElectionConfig": "potluck.core.election_events",
    "ElectionEvent": "potluck.core.election_events",
    "ElectionKind": "potluck.core.election_events",
    "ElectionManager": "potluck.core.election",
    "ElectionRole": "potluck.core.election_events",
    "ElectionState": "potluck.core.election_events",
    "GradientCompressor": "potluck.collective.compression.compressor",
    "HealthConfig": "potluck.core.health_config",
    "HealthEvent": "potluck.core.health_records",
    "HealthMonitor": "potluck.core.health",
    "HealthStatus": "potluck.core.health_records",
    "HealthSummary": "potluck.core.health_records",
    "HybridBackend": "potluck.backend.engines.hybrid",
    "LocalSgd": "potluck.training.local_sgd",
    "MetricsCollector": "potluck.runtime.metrics_exposition",
    "MetricsEndpoint": "potluck.runtime.metrics_endpoint",
    "MetricsSnapshot": "potluck.metrics",
    "MpiBackend": "potluck.backend.engines.mpi",
    "NetworkNamespace": "potluck.net.namespace",
    "NodeIdentity": "potluck.net.identity",
    "NodeProfile": "potluck.core.topology_nodes",
    "Operation": "potluck.backend.operation",
    "ProcessId": "potluck.vocabulary",
    "QuantizationType": "potluck.collective.compression.strategy",
    "ReduceOp": "potluck.collective.reduce",
    "ReduceStrategy": "potluck.collective.strategies",
    "RingBackend": "potluck.runtime.ring",
    "RpcAgent": "potluck.runtime.rpc",
    "RpcBusy": "potluck.core.calls_errors",
    "RpcCancelled": "potluck.core.calls_errors",
    "RpcConfig": "potluck.runtime.rpc_config",
    "RpcError": "potluck.core.calls_errors",
    "RpcFunctionNotFound": "potluck.core.calls_errors",
    "RpcFuture": "potluck.runtime.rpc_calls",
    "RpcInternal": "potluck.core.calls_errors",
    "RpcInvalidMessage": "potluck.core.calls_errors",
    "RpcNoConnection": "potluck.core.calls_errors",
    "RpcRemoteError": "potluck.core.calls_errors",
    "RpcTimeout": "potluck.core.calls_errors",
    "RpcTooLarge": "potluck.core.calls_errors",
    "SecurityWarning": "potluck.net.namespace",
    "SharedMetrics": "potluck.metrics",
    "SharedTopology": "potluck.runtime.topology",
    "SimulatedBackend": "potluck.backend.simulated",
    "SimulatedFaults": "potluck.backend.simulated",
    "StepOutcome": "potluck.training.elastic_outcome",
    "SubBackend": "potluck.backend.sub",
    "TcpBackend": "potluck.backend.tcp",
    "TcpRpcBackend": "potluck.runtime.rpc_tcp",
    "TorchBackend": "potluck.backend.engines.torch",
    "TrainingState": "potluck.training.state",
    "View": "potluck.vocabulary",
    "ViewChange": "potluck.runtime.cluster_events",
    "Work": "potluck.runtime.work",
    "all_gather": "potluck.runtime.functions",
    "all_reduce": "potluck.runtime.functions",
    "all_to_all": "potluck.runtime.functions",
    "allreduce": "potluck.runtime.functions",
    "barrier": "potluck.runtime.functions",
    "broadcast": "potluck.runtime.functions",
    "gather": "potluck.runtime.functions",
    "join": "potluck.runtime.joining",
    "reduce": "potluck.runtime.functions",
    "reduce_scatter": "potluck.runtime.functions",
    "scatter": "potluck.runtime.functions",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    if name == "TcpBackend":
        _import_module("potluck.runtime.presence")  # shows its groups to `potluck status`
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if "POTLUCK_LAST_WORDS" in _os.environ:  # started by `potluck run`, which asks why a script failed
    _import_module("potluck.runtime.last_words").install()
