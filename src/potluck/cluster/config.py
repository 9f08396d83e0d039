"""AutoDiscoveryConfig: how a node finds its cluster and what it wants of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from potluck._decode import decode_json
from potluck._types import settle_seconds
from potluck.errors import BackendUnavailable
from potluck.identity.node import MAX_NAME, machine_name
from potluck.membership.events import ClusterConfig, ElectionConfig
from potluck.membership.health import HealthConfig
from potluck.metrics.registry import DistributedMetrics
from potluck.net.addresses import MAX_PORT

if TYPE_CHECKING:
    from potluck.discovery.records import DiscoveryConfig
    from potluck.identity.namespace import NetworkNamespace
    from potluck.membership.topology import NodeProfile
    from potluck.schedule.planner import CollectiveConfig


MAX_JOB = 128
"""Characters of a job's name."""

_MOST_RANK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class AutoDiscoveryConfig:
    """How a node finds its cluster.  What is not given comes from the environment, then by default.

    >>> AutoDiscoveryConfig(job="mnist", min_nodes=3).cluster().min_nodes
    3
    """

    job: str | None = None
    """Only nodes with the same job meet; ``POTLUCK_JOB``, or the name of the script."""
    min_nodes: int | None = None
    """With fewer nodes no cluster is founded; ``POTLUCK_MIN_NODES``, or 1.

    Machines that begin together under ``potluck run`` wait for each other in any case.
    """
    namespace: NetworkNamespace | str | None = None
    """Whose members may come; unless given, the namespace this machine uses."""
    name: str | None = None
    """What others call this node; ``POTLUCK_NAME``, or the name of the machine."""
    peers: Sequence[str] = ()
    """Addresses to try beside what is found, ``host`` or ``host:port``; ``POTLUCK_PEERS``."""
    port: int | None = None
    """Where to listen; unless given, at ``POTLUCK_PORT`` or the first usual one that is free."""
    host: str = ""
    """The address to listen on; all of this machine's unless given."""
    interfaces: Sequence[str] = ()
    """Use these network interfaces alone; ``POTLUCK_INTERFACES``."""
    virtual: bool = False
    """Use interfaces of containers and VPNs as well."""
    multicast: bool = True
    """Look for others by multicast DNS."""
    neighbours: bool = True
    """Look for others on this machine."""
    known: bool = True
    """Try those of the last run, and remember those of this one."""
    quorum: Literal["majority", "any"] = "majority"
    """With "any", machines that are cut off from the majority continue by themselves."""
    solo_delay: float = 1.0
    """Seconds that a node which finds no other one looks around before it starts alone."""
    health: HealthConfig | None = None
    """Deadlines of failure detection; unless given, those for Wi-Fi on a machine that is on Wi-Fi,
    and those for cables on others."""
    election: ElectionConfig = field(default_factory=ElectionConfig)
    probes: bool | None = None
    """Measure the links in quiet moments; unless given, what ``POTLUCK_PROBES`` says, or yes.
    Collectives look at their links all the same: ``CollectiveConfig.measure_links``."""
    collectives: CollectiveConfig | None = None
    """How collectives shall run, for those who want a say in it."""
    schema: str = ""
    """Names the shape of the state that is trained; only equal ones become one cluster."""
    metrics: DistributedMetrics | bool = True
    """Where to count what happens; False counts nothing but what the node itself does."""
    metrics_port: int | None = None
    """Where metrics can be read over HTTP, 0 for any free port; ``POTLUCK_METRICS_PORT``.

    Workers that a launcher starts on one machine count from there by their ``LOCAL_RANK``.
    """
    metrics_host: str | None = None
    """The address for that; this machine's own unless given; ``POTLUCK_METRICS_HOST``."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What ``potluck status`` shows beside the rest: the script, versions."""

    def __post_init__(self) -> None:
        """Refuse what could only fail later, or wait for ever."""
        settle_seconds(self)
        for field_name in ("job", "name", "host", "schema"):
            _check_text(field_name, getattr(self, field_name))
        for field_name in ("peers", "interfaces"):
            _check_list(field_name, getattr(self, field_name))
        _check_port("port", self.port)
        _check_port("metrics_port", self.metrics_port)
        for field_name, kind in (("health", HealthConfig), ("election", ElectionConfig)):
            given = getattr(self, field_name)
            if not isinstance(given, kind) and (given is not None or field_name != "health"):
                msg = f"{field_name} must be of type {kind.__name__}, got {given!r}"
                raise TypeError(msg)
        if not hasattr(self.namespace, "secret"):  # a NetworkNamespace, which is dear to import
            _check_text("namespace", self.namespace)
        if not isinstance(self.facts, Mapping):
            msg = f"facts must map names to strings, got {self.facts!r}"
            raise TypeError(msg)

    @property
    def job_name(self) -> str:
        """The job, wherever it is said."""
        job = self.job or os.environ.get("POTLUCK_JOB", "") or default_job()
        if len(job) > MAX_JOB or not job.isprintable():
            msg = (
                f"A job's name must have at most {MAX_JOB} printable characters, got {job[:200]!r}"
            )
            raise ValueError(msg)
        return job

    @property
    def node_name(self) -> str:
        """What others call this node, wherever it is said.

        >>> AutoDiscoveryConfig(name="attic").node_name
        'attic'
        """
        name = self.name or machine_name()
        if len(name) > MAX_NAME or not name.isprintable():
            msg = f"A name must have at most {MAX_NAME} printable characters, got {name[:200]!r}"
            raise ValueError(msg)
        return name

    @property
    def wanted_nodes(self) -> int:
        """How many nodes there must be, wherever it is said."""
        given = _number("POTLUCK_MIN_NODES", 1)
        if self.min_nodes is None:
            return given
        # Launchers that begin together have announced this many: none must be left waiting.  One
        # that comes later gets no RANK, and joins those who are there.
        began_together = {"POTLUCK_RUN", "RANK"} <= os.environ.keys()
        return max(self.min_nodes, given) if began_together else self.min_nodes

    @property
    def wished_port(self) -> int:
        """Where to listen if that is possible: what the launcher of a run says; 0 for no wish."""
        return _number("POTLUCK_PORT", 0) if self.port is None else 0

    @property
    def wished_rank(self) -> int:
        """The rank in the first view, if possible, as ``potluck run`` says; -1 for no wish."""
        rank = _number("RANK", _MOST_RANK) if "POTLUCK_RUN" in os.environ else _MOST_RANK
        return rank if rank < _MOST_RANK else -1

    def registry(self) -> DistributedMetrics | None:
        """Where to count, if that is wanted."""
        if isinstance(self.metrics, DistributedMetrics):
            return self.metrics
        return DistributedMetrics() if self.metrics else None

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Where metrics can be read, wherever it is said."""
        port = self.metrics_port
        if port is None and os.environ.get("POTLUCK_METRICS_PORT", "").strip():
            port = _number("POTLUCK_METRICS_PORT", 0)
            port += _number("LOCAL_RANK", 0) if port else 0  # workers of one machine, side by side
        if port is None or not self.metrics:
            return None
        return self.metrics_host or os.environ.get("POTLUCK_METRICS_HOST", "") or "127.0.0.1", port

    @property
    def known_facts(self) -> Mapping[str, str]:
        """What is told about the run, wherever it is said."""
        text = os.environ.get("POTLUCK_FACTS", "")
        if self.facts or not text:
            return self.facts
        try:
            return decode_json(text, dict[str, str])
        except msgspec.DecodeError:
            return {}

    @property
    def probes_links(self) -> bool:
        """Whether to measure links in quiet moments, wherever it is said."""
        if self.probes is not None:
            return self.probes
        return os.environ.get("POTLUCK_PROBES", "").strip().lower() not in {"0", "no", "off"}

    def cluster(self, machine: NodeProfile | None = None) -> ClusterConfig:
        """What the members agree by; ``machine`` is the one this node runs on.

        The longest pause that a member asks for holds for a view, so one member on Wi-Fi makes all
        of them patient.

        >>> from potluck import NodeProfile
        >>> from potluck.membership.topology import Medium
        >>> on_wifi = NodeProfile(medium=Medium("wireless"))
        >>> AutoDiscoveryConfig().cluster(on_wifi).health == HealthConfig.wifi()
        True
        """
        usual = HealthConfig.wifi() if machine and machine.is_wireless else HealthConfig()
        return ClusterConfig(
            min_nodes=self.wanted_nodes,
            quorum=self.quorum,
            solo_delay=self.solo_delay,
            health=self.health or usual,
            election=self.election,
        )

    def discovery(self, *, announce: bool = True) -> DiscoveryConfig:
        """Where to look for others."""
        from dataclasses import replace

        from potluck.discovery.records import DiscoveryConfig

        found = DiscoveryConfig.from_environment(self.peers)
        return replace(
            found,
            interfaces=tuple(self.interfaces) or found.interfaces,
            virtual=self.virtual,
            multicast=self.multicast,
            neighbours=self.neighbours,
            known=self.known,
            announce=announce,
        )


def default_job(argv: Sequence[str] | None = None) -> str:
    """The name of the script that runs: the same on all machines, wherever it lies.

    >>> default_job(["/home/me/mnist/train.py", "--epochs", "3"])
    'train.py'
    """
    script = (sys.argv if argv is None else argv)[:1]
    name = Path(script[0]).name if script and script[0] not in {"", "-c", "-m", "-"} else ""
    return name[:MAX_JOB] or "interactive"


def _check_text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        msg = f"{name} must be a string, got {value!r}"
        raise TypeError(msg)


def _check_list(name: str, value: object) -> None:
    if isinstance(value, str):
        msg = f"{name} must be a list; write {name}=[{value!r}]"
        raise TypeError(msg)
    if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        msg = f"{name} must be a list of strings, got {value!r}"
        raise TypeError(msg)


def _check_port(name: str, value: object) -> None:
    if value is None or (type(value) is int and 0 <= value <= MAX_PORT):
        return
    msg = f"{name} must be an integer from 0 (any free port) to {MAX_PORT}, got {value!r}"
    raise ValueError(msg)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9:  # noqa: PLR2004
        raise BackendUnavailable(f"{name} must be a non-negative integer, got {text!r}")
    return int(text)
