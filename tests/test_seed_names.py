"""Every public name of the three origin documents has its place here.

The origin documents are two Rust crates' sources: ``ferrotorch_distributed`` (its backends and its
remote calls) and ``pmetal_distributed`` (its root module).  Somebody who knows them finds each name
in the tables below: where it lives in Potluck, what Python has instead, or which capability it is
waiting for.  A name that waits is not forgotten: as soon as something of that name exists, the
table must say where.
"""

import ast
import functools
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import potluck
from support import architecture

TESTS_FOLDER = Path(__file__).parent
SOURCE_FOLDER = TESTS_FOLDER.parent / "src" / "potluck"


@dataclass(frozen=True)
class At:
    """It exists: the dotted path under which it resolves."""

    path: str


@dataclass(frozen=True)
class Instead:
    """Python has another way: the sentence that says which."""

    sentence: str


@dataclass(frozen=True)
class Planned:
    """It waits for a capability until something named ``until``, or itself or its owner, exists."""

    capability: str
    until: str | None = None


Place = At | Instead | Planned

TRAINING = Instead("PyTorch's own, over the backend that potluck.torch registers.")

EXCEPTIONS = Instead("A function returns its value or raises a potluck.DistributedError.")
CONSTRUCTOR = Instead("Python calls the class itself.")

BACKEND_DOCUMENT: dict[str, Place] = {
    "backend": At("potluck.backend"),
    "Backend": At("potluck.Backend"),
    "Backend.rank": At("potluck.Backend.rank"),
    "Backend.world_size": At("potluck.Backend.world_size"),
    "Backend.send": At("potluck.Backend.send"),
    "Backend.recv": At("potluck.Backend.recv"),
    "Backend.recv_timeout": At("potluck.Backend.recv_timeout"),
    "Backend.barrier": At("potluck.Backend.barrier"),
    "Backend.as_nccl_backend": At("potluck.Backend.as_nccl_backend"),
    "TcpBackend": At("potluck.TcpBackend"),
    "TcpBackend.new": CONSTRUCTOR,
    "TcpBackend.rank": At("potluck.TcpBackend.rank"),
    "TcpBackend.world_size": At("potluck.TcpBackend.world_size"),
    "TcpBackend.send": At("potluck.TcpBackend.send"),
    "TcpBackend.recv": At("potluck.TcpBackend.recv"),
    "TcpBackend.recv_timeout": At("potluck.TcpBackend.recv_timeout"),
    "TcpBackend.barrier": At("potluck.TcpBackend.barrier"),
    "SimulatedBackend": At("potluck.SimulatedBackend"),
    "SimulatedBackend.create_group": At("potluck.SimulatedBackend.create_group"),
    "SimulatedBackend.rank": At("potluck.SimulatedBackend.rank"),
    "SimulatedBackend.world_size": At("potluck.SimulatedBackend.world_size"),
    "SimulatedBackend.send": At("potluck.SimulatedBackend.send"),
    "SimulatedBackend.recv": At("potluck.SimulatedBackend.recv"),
    "SimulatedBackend.recv_timeout": At("potluck.SimulatedBackend.recv_timeout"),
    "SimulatedBackend.barrier": At("potluck.SimulatedBackend.barrier"),
    "ChannelMatrix": Instead("A private type; the ranks of a simulated group share one object."),
    "SubBackend": At("potluck.SubBackend"),
    "SubBackend.new": CONSTRUCTOR,
    "SubBackend.members": At("potluck.SubBackend.members"),
    "SubBackend.to_global": At("potluck.SubBackend.to_global"),
    "SubBackend.to_local": At("potluck.SubBackend.to_local"),
    "SubBackend.parent": At("potluck.SubBackend.parent"),
    "SubBackend.rank": At("potluck.SubBackend.rank"),
    "SubBackend.world_size": At("potluck.SubBackend.world_size"),
    "SubBackend.send": At("potluck.SubBackend.send"),
    "SubBackend.recv": At("potluck.SubBackend.recv"),
    "SubBackend.recv_timeout": At("potluck.SubBackend.recv_timeout"),
    "SubBackend.barrier": At("potluck.SubBackend.barrier"),
    "error": At("potluck.errors"),
    "DistributedError": At("potluck.DistributedError"),
    "DistributedError.InvalidWorldSize": At("potluck.InvalidWorldSize"),
    "DistributedError.InvalidRank": At("potluck.InvalidRank"),
    "DistributedError.Io": At("potluck.IoError"),
    "DistributedError.SelfSend": At("potluck.SelfSend"),
    "DistributedError.NoConnection": At("potluck.NoConnection"),
    "DistributedError.LockPoisoned": Instead(
        "Nothing: a Python lock is released when an error passes through it, never poisoned."
    ),
    "DistributedError.SizeMismatch": At("potluck.SizeMismatch"),
    "DistributedError.Timeout": At("potluck.Timeout"),
    "DistributedError.ChannelClosed": At("potluck.ChannelClosed"),
    "FerrotorchError": Instead("potluck.DistributedError is the root of every error."),
    "FerrotorchResult": EXCEPTIONS,
    # Named in the documentation comments of that document.
    "collective": At("potluck.collective.context"),
    "collective.allreduce": At("potluck.allreduce"),
    "collective.all_gather": At("potluck.all_gather"),
    "collective.reduce_scatter": At("potluck.reduce_scatter"),
    "collective.barrier": At("potluck.barrier"),
    "p2p": Instead("send, recv, sendrecv, isend and irecv are methods of every context."),
    "ddp": TRAINING,
    "fsdp": TRAINING,
    "fsdp.ShardingStrategy": TRAINING,
    "fsdp.ShardingStrategy.HybridShard": TRAINING,
    "hybrid_backend": At("potluck.backend.adapters.hybrid"),
    "nccl_backend": At("potluck.backend.adapters.torch"),
    "NcclBackend": Instead("potluck.TorchBackend, over a process group of PyTorch that uses NCCL."),
    "gpu_collective": At("potluck.torch.gpu"),
    "gpu_collective.gpu_allreduce": At("potluck.torch.gpu.gpu_allreduce"),
    "gpu_collective.gpu_broadcast": At("potluck.torch.gpu.gpu_broadcast"),
}

RPC_DOCUMENT: dict[str, Place] = {
    "rpc": At("potluck.rpc.agent"),
    "MAX_RPC_MSG_SIZE": At("potluck.rpc.agent.MAX_RPC_MSG_SIZE"),
    "RpcError": At("potluck.RpcError"),
    "RpcError.FunctionNotFound": At("potluck.RpcFunctionNotFound"),
    "RpcError.InvalidMessage": At("potluck.RpcInvalidMessage"),
    "RpcError.NoConnection": At("potluck.RpcNoConnection"),
    "RpcError.Internal": At("potluck.RpcInternal"),
    "RpcError.Timeout": At("potluck.RpcTimeout"),
    "RpcRequest": At("potluck.rpc.protocol.RpcRequest"),
    "RpcRequest.serialize": At("potluck.rpc.protocol.RpcRequest.serialize"),
    "RpcRequest.deserialize": At("potluck.rpc.protocol.RpcRequest.deserialize"),
    "RpcResponse": At("potluck.rpc.protocol.RpcResponse"),
    "RpcResponse.serialize": At("potluck.rpc.protocol.RpcResponse.serialize"),
    "RpcResponse.deserialize": At("potluck.rpc.protocol.RpcResponse.deserialize"),
    "RpcHandler": At("potluck.rpc.server.RpcHandler"),
    "TcpRpcBackend": At("potluck.TcpRpcBackend"),
    "TcpRpcBackend.new": CONSTRUCTOR,
    "TcpRpcBackend.send": At("potluck.TcpRpcBackend.send"),
    "TcpRpcBackend.recv": At("potluck.TcpRpcBackend.recv"),
    "TcpRpcBackend.rank": At("potluck.TcpRpcBackend.rank"),
    "TcpRpcBackend.world_size": At("potluck.TcpRpcBackend.world_size"),
    "RpcAgent": At("potluck.RpcAgent"),
    "RpcAgent.new": CONSTRUCTOR,
    "RpcAgent.register": At("potluck.RpcAgent.register"),
    "RpcAgent.lookup": At("potluck.RpcAgent.lookup"),
    "RpcAgent.rpc_sync": At("potluck.RpcAgent.rpc_sync"),
    "RpcAgent.rpc_async": At("potluck.RpcAgent.rpc_async"),
    "RpcAgent.handle_request": At("potluck.RpcAgent.handle_request"),
    "RpcAgent.rank": At("potluck.RpcAgent.rank"),
    "RpcAgent.world_size": At("potluck.RpcAgent.world_size"),
}

ROOT_DOCUMENT: dict[str, Place] = {
    "auto": At("potluck.cluster"),
    "config": At("potluck.collective.context"),
    "discovery": At("potluck.discovery.service"),
    "error": At("potluck.errors"),
    "identity": At("potluck.identity.node"),
    "ring": At("potluck.collective.context"),
    "topology": At("potluck.membership.topology"),
    "transport": At("potluck.net.transport"),
    "collective": At("potluck.schedule"),
    "compression": At("potluck.compression"),
    "election": At("potluck.membership"),
    "health": At("potluck.membership.health"),
    "metrics": At("potluck.metrics"),
    "namespace": At("potluck.identity.namespace"),
    "prelude": Instead("`from potluck import ...`: the package root is the prelude."),
    "AutoDiscoveryBackend": At("potluck.AutoDiscoveryBackend"),
    "AutoDiscoveryBackend.new": CONSTRUCTOR,
    "AutoDiscoveryBackend.wait_for_peers": At("potluck.AutoDiscoveryBackend.wait_for_peers"),
    "AutoDiscoveryConfig": At("potluck.AutoDiscoveryConfig"),
    "AllReduceStrategy": At("potluck.AllReduceStrategy"),
    "BroadcastStrategy": At("potluck.BroadcastStrategy"),
    "ReduceStrategy": At("potluck.ReduceStrategy"),
    "CollectiveConfig": At("potluck.CollectiveConfig"),
    "CompressionStrategy": At("potluck.CompressionStrategy"),
    "GradientCompressor": At("potluck.GradientCompressor"),
    "QuantizationType": At("potluck.QuantizationType"),
    "DistributedConfig": At("potluck.DistributedConfig"),
    "DistributedConfig.new": CONSTRUCTOR,
    "ElectionConfig": At("potluck.ElectionConfig"),
    "ElectionEvent": At("potluck.ElectionEvent"),
    "ElectionManager": At("potluck.ElectionManager"),
    "ElectionState": At("potluck.ElectionState"),
    "DistributedError": At("potluck.DistributedError"),
    "DistributedResult": EXCEPTIONS,
    "HealthConfig": At("potluck.HealthConfig"),
    "HealthEvent": At("potluck.HealthEvent"),
    "HealthMonitor": At("potluck.HealthMonitor"),
    "HealthStatus": At("potluck.HealthStatus"),
    "HealthSummary": At("potluck.HealthSummary"),
    "NodeIdentity": At("potluck.NodeIdentity"),
    "DistributedMetrics": At("potluck.DistributedMetrics"),
    "DistributedMetrics.all_reduce": At("potluck.DistributedMetrics.all_reduce"),
    "DistributedMetrics.all_reduce.duration_ms": At(
        "potluck.metrics.registry.OperationMetrics.duration_ms"
    ),
    "DistributedMetrics.all_reduce.bytes_processed": At(
        "potluck.metrics.registry.OperationMetrics.bytes_processed"
    ),
    "DistributedMetrics.all_reduce.completed": At(
        "potluck.metrics.registry.OperationMetrics.completed"
    ),
    "DistributedMetrics.all_reduce.failed": At("potluck.metrics.registry.OperationMetrics.failed"),
    "DistributedMetrics.barrier": At("potluck.DistributedMetrics.barrier"),
    "DistributedMetrics.barrier.duration_ms": At(
        "potluck.metrics.registry.OperationMetrics.duration_ms"
    ),
    "DistributedMetrics.barrier.completed": At(
        "potluck.metrics.registry.OperationMetrics.completed"
    ),
    "DistributedMetrics.barrier.failed": At("potluck.metrics.registry.OperationMetrics.failed"),
    "DistributedMetrics.snapshot": At("potluck.DistributedMetrics.snapshot"),
    "MetricsSnapshot": At("potluck.MetricsSnapshot"),
    "SharedMetrics": At("potluck.SharedMetrics"),
    "NetworkNamespace": At("potluck.NetworkNamespace"),
    "RingBackend": At("potluck.RingBackend"),
    "RingBackend.new": CONSTRUCTOR,
    "ClusterTopology": At("potluck.ClusterTopology"),
    "ConnectionProfile": At("potluck.ConnectionProfile"),
    "NodeProfile": At("potluck.NodeProfile"),
    "SharedTopology": At("potluck.SharedTopology"),
    "DistributedBackend": At("potluck.DistributedBackend"),
    "DistributedBackend.rank": At("potluck.DistributedBackend.rank"),
    "DistributedBackend.world_size": At("potluck.DistributedBackend.world_size"),
    "DistributedBackend.all_reduce": At("potluck.DistributedBackend.all_reduce"),
    "DistributedBackend.barrier": At("potluck.DistributedBackend.barrier"),
    "DistributedContext": At("potluck.DistributedContext"),
    "DistributedContext.new": CONSTRUCTOR,
    "DistributedContext.with_metrics": At("potluck.DistributedContext.with_metrics"),
    "DistributedContext.rank": At("potluck.DistributedContext.rank"),
    "DistributedContext.world_size": At("potluck.DistributedContext.world_size"),
    "DistributedContext.all_reduce": At("potluck.DistributedContext.all_reduce"),
    "DistributedContext.barrier": At("potluck.DistributedContext.barrier"),
    "DistributedContext.is_master": At("potluck.DistributedContext.is_master"),
    "DistributedContext.metrics_snapshot": At("potluck.DistributedContext.metrics_snapshot"),
}

# What the modules of the third document give to its root, as its ``pub use`` lines say.
REEXPORTS: dict[str, tuple[str, ...]] = {
    "auto": ("AutoDiscoveryBackend", "AutoDiscoveryConfig"),
    "collective": ("AllReduceStrategy", "BroadcastStrategy", "CollectiveConfig", "ReduceStrategy"),
    "compression": ("CompressionStrategy", "GradientCompressor", "QuantizationType"),
    "config": ("DistributedConfig",),
    "election": ("ElectionConfig", "ElectionEvent", "ElectionManager", "ElectionState"),
    "error": ("DistributedError",),
    "health": ("HealthConfig", "HealthEvent", "HealthMonitor", "HealthStatus", "HealthSummary"),
    "identity": ("NodeIdentity",),
    "metrics": ("DistributedMetrics", "MetricsSnapshot", "SharedMetrics"),
    "namespace": ("NetworkNamespace",),
    "ring": ("RingBackend",),
    "topology": ("ClusterTopology", "ConnectionProfile", "NodeProfile"),
}

# Parameters that have another name there: (where here, there, here).
PARAMETERS: tuple[tuple[str, str, str], ...] = (
    ("potluck.Backend.send", "dst_rank", "dst"),
    ("potluck.Backend.recv", "dst", "into"),
    ("potluck.Backend.recv", "src_rank", "src"),
    ("potluck.Backend.recv_timeout", "dst", "into"),
    ("potluck.Backend.recv_timeout", "src_rank", "src"),
    ("potluck.SubBackend.to_local", "global", "global_"),
    ("potluck.TcpRpcBackend.send", "dst_rank", "dst"),
    ("potluck.TcpRpcBackend.recv", "dst", "into"),
    ("potluck.TcpRpcBackend.recv", "src_rank", "src"),
    ("potluck.RpcAgent.rpc_sync", "dst_rank", "dst"),
    ("potluck.RpcAgent.rpc_sync", "function_name", "name"),
    ("potluck.RpcAgent.rpc_sync", "args", "payload"),
    ("potluck.RpcAgent.rpc_async", "dst_rank", "dst"),
    ("potluck.RpcAgent.rpc_async", "function_name", "name"),
    ("potluck.RpcAgent.rpc_async", "args", "payload"),
    ("potluck.RpcAgent.handle_request", "src_rank", "src"),
    ("potluck.RpcAgent.handle_request", "request_data", "data"),
    ("potluck.DistributedContext.all_reduce", "buffer", "array"),
)

# What the third document's prelude offers must be importable from the package root.
PRELUDE = (
    *("DistributedBackend", "DistributedContext", "AutoDiscoveryBackend", "AutoDiscoveryConfig"),
    *("AllReduceStrategy", "CollectiveConfig", "CompressionStrategy", "GradientCompressor"),
    *("DistributedConfig", "ElectionConfig", "ElectionManager", "DistributedError"),
    *("DistributedResult", "HealthConfig", "HealthMonitor", "HealthStatus", "NodeIdentity"),
    *("DistributedMetrics", "SharedMetrics", "NetworkNamespace", "RingBackend"),
    *("ClusterTopology", "NodeProfile"),
)

# Each error variant of the origin with the facts it carried.
VARIANTS: dict[str, tuple[potluck.DistributedError, dict[str, object]]] = {
    "InvalidWorldSize": (potluck.InvalidWorldSize(0), {"world_size": 0}),
    "InvalidRank": (potluck.InvalidRank(5, 2), {"rank": 5, "world_size": 2}),
    "Io": (potluck.IoError("no"), {"message": "no"}),
    "SelfSend": (potluck.SelfSend(1), {"rank": 1}),
    "NoConnection": (potluck.NoConnection("no", rank=1), {"rank": 1}),
    "SizeMismatch": (potluck.SizeMismatch(4, 8), {"expected": 4, "got": 8}),
    "Timeout": (potluck.Timeout("late", seconds=0.5), {"seconds": 0.5}),
    "ChannelClosed": (potluck.ChannelClosed("closed"), {"message": "closed"}),
}

# The tests that the origin documents contain: ours, as file::function.
ORIGIN_TESTS: dict[str, At | Planned] = {
    "test_simulated_send_recv": At("backend/test_simulated.py"),
    "test_simulated_barrier": At("backend/test_simulated.py"),
    "test_simulated_rank_world_size": At("backend/test_simulated.py"),
    "test_invalid_world_size": At("backend/test_simulated.py"),
    "test_send_to_invalid_rank": At("backend/test_simulated.py"),
    "test_subbackend_local_rank_and_world_size": At("backend/test_sub.py"),
    "test_subbackend_global_rank_not_in_members_is_error": At("backend/test_sub.py"),
    "test_subbackend_empty_members_is_error": At("backend/test_sub.py"),
    "test_subbackend_send_recv_routes_through_parent": At("backend/test_sub.py"),
    "test_subbackend_barrier": At("backend/test_sub.py"),
    "test_subbackend_to_global_to_local": At("backend/test_sub.py"),
    "test_subbackend_sorts_and_dedups_members": At("backend/test_sub.py"),
    "test_rpc_request_roundtrip": At("rpc/test_protocol.py"),
    "test_rpc_response_roundtrip_ok": At("rpc/test_protocol.py"),
    "test_rpc_response_roundtrip_error": At("rpc/test_protocol.py"),
    "test_max_message_size_constant": At("rpc/test_protocol.py"),
    "test_rpc_agent_register_lookup": At("rpc/test_agent.py"),
    "test_rpc_agent_lookup_missing": At("rpc/test_agent.py"),
}

TABLES = {"backend": BACKEND_DOCUMENT, "rpc": RPC_DOCUMENT, "root": ROOT_DOCUMENT}
ROWS = [
    pytest.param(name, place, id=f"{document}:{name}")
    for document, table in TABLES.items()
    for name, place in table.items()
]


def definitions() -> Iterator[tuple[str, str]]:
    """Names that the package defines, with their place: modules, what is in them, and members."""
    for module in architecture.load(SOURCE_FOLDER).values():
        yield module.name.rpartition(".")[2], module.name
        for name, node in _defined(module.tree):
            yield name, f"{module.name}.{name}"
            for member, _ in _defined(node) if isinstance(node, ast.ClassDef) else ():
                yield f"{name}.{member}", f"{module.name}.{name}.{member}"


def _defined(node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child.name, child
        for target in getattr(child, "targets", [getattr(child, "target", None)]):
            if isinstance(target, ast.Name):
                yield target.id, child


def overdue(name: str, plan: Planned, defined: dict[str, str]) -> str | None:
    """Where a name that is said to be waiting exists already, or None."""
    awaited = {plan.until} if plan.until else {name, name.partition(".")[0]}
    return next((defined[key] for key in sorted(awaited) if key in defined), None)


@functools.cache
def defined() -> dict[str, str]:
    """The places of all names; looked for when a test asks."""
    return dict(definitions())


@pytest.mark.parametrize(("name", "place"), ROWS)
def test_every_name_of_the_origin_has_its_place(name: str, place: Place) -> None:
    """A located name resolves, an equivalent is a sentence, a planned name does not exist yet."""
    match place:
        case At(path):
            assert pkgutil.resolve_name(path) is not None
        case Instead(sentence):
            assert sentence.endswith(".")
        case Planned():
            found = overdue(name, place, defined())
            assert found is None, f"{name} is called planned, but {found} exists: say where it is"


@pytest.mark.parametrize("name", PRELUDE)
def test_the_prelude_is_the_package_root(name: str) -> None:
    """What the origin's prelude offered and exists here is a public name of the package."""
    place = ROOT_DOCUMENT[name]
    if isinstance(place, At):
        assert place.path == f"potluck.{name}"
        assert name in potluck.__all__


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_error_variant_carries_its_facts(variant: str) -> None:
    """The fields of each variant are attributes of our error, which can say them in words."""
    error, facts = VARIANTS[variant]
    place = BACKEND_DOCUMENT[f"DistributedError.{variant}"]
    assert isinstance(place, At)
    assert type(error) is pkgutil.resolve_name(place.path)
    assert {name: getattr(error, name) for name in facts} == facts
    assert str(error)


def test_every_error_variant_is_listed() -> None:
    """The table of facts covers each located variant."""
    located = {
        name.removeprefix("DistributedError.")
        for name, place in BACKEND_DOCUMENT.items()
        if name.startswith("DistributedError.") and isinstance(place, At)
    }
    assert located == VARIANTS.keys()


def functions_in(file: Path) -> set[str]:
    """Names of the test functions in a file, those in classes included."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("name", "place"), ORIGIN_TESTS.items(), ids=ORIGIN_TESTS)
def test_every_test_of_the_origin_exists_here(name: str, place: At | Planned) -> None:
    """A test of the origin is found under its own name, unless its subject does not exist yet."""
    if isinstance(place, At):
        assert name in functions_in(TESTS_FOLDER / place.path)
    else:
        found = [file for file in TESTS_FOLDER.rglob("*.py") if name in functions_in(file)]
        assert found == [], "called planned, but it exists: say where it is"


def test_a_name_said_to_be_planned_is_caught_when_it_exists() -> None:
    """The guard sees classes, their members, functions, constants and modules."""
    plan = Planned("nothing")
    for name in ("DistributedError", "from_os_error", "errors", "DistributedError.recoverable"):
        assert overdue(name, plan, defined()) is not None
    assert overdue("DistributedError.Fantasy", plan, defined()) is not None  # its owner exists
    assert overdue("Fantasy", plan, defined()) is None
    assert overdue("Fantasy", Planned("nothing", until="DistributedError"), defined()) is not None
    assert overdue("DistributedError", Planned("nothing", until="Fantasy"), defined()) is None


@pytest.mark.parametrize("module", REEXPORTS)
def test_a_module_of_the_origin_is_where_its_names_are(module: str) -> None:
    """The module named here defines them, or one beside it whose name begins alike."""
    place = ROOT_DOCUMENT[module]
    assert isinstance(place, At)
    for name in REEXPORTS[module]:
        assert getattr(potluck, name).__module__.startswith(place.path)


@pytest.mark.parametrize(("path", "there", "here"), PARAMETERS)
def test_every_parameter_that_is_called_otherwise_is_listed(
    path: str, there: str, here: str
) -> None:
    """The page names both, and the one here exists."""
    assert here in inspect.signature(pkgutil.resolve_name(path)).parameters
    page = (TESTS_FOLDER.parent / "docs" / "internals" / "origins.md").read_text(encoding="utf-8")
    assert f"| `{path}` | `{there}` | `{here}` |" in page
