"""``potluck bench``: how fast this cluster is, and what would make it faster."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.options import Json, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from potluck.apps.cli.bench_report import Results
    from potluck.runtime.cluster import Cluster

__all__ = ["EXAMPLES", "EXIT_CODES", "bench"]

EXAMPLES = """\
potluck bench                     on each machine; begins when all of the circle are there
potluck bench --nodes 2 --quick   begins when two are there, and takes a few seconds
potluck bench --local 3           three processes of this machine
"""

EXIT_CODES = (
    "Exit codes: 0 measured, 1 failed (the reason is on stderr), 2 wrong usage, "
    "3 not enough machines came in time, 130 interrupted."
)

TOO_FEW = 3

TRIES = 3
"""Measurements that are begun if machines come or go meanwhile."""

JOB = "potluck bench"
"""Those who measure meet, and nobody else."""

WIDE = 160
"""Columns where there is no terminal to fit into: nothing is cut off in a file."""


def bench(
    *,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=2, help="How many machines must be there.", show_default="all of the namespace"
        ),
    ] = None,
    local: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=64,
            help="Measure so many processes of this machine instead.",
            show_default="2 where no other machine is paired",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, less exact.")] = False,
    namespace: Namespace = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Try this address too; may be given several times."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Give up waiting after so many seconds.")
    ] = 60.0,
    json: Json = False,
    job: Annotated[str, typer.Option(hidden=True)] = JOB,
    member: Annotated[bool, typer.Option("--member", hidden=True)] = False,
) -> None:
    """Measure this cluster: its links, the best algorithm for every size, what compression gives.

    Type it on each machine, like `potluck run`; all show the same tables. Every link is probed for
    a moment, so nothing else should run. Without another machine, processes of this one are
    measured.
    """
    from potluck.apps.cli.bench_progress import open_progress

    if nodes is not None and local is not None:
        raise typer.BadParameter("either --nodes or --local", param_hint="--local")
    if nodes is None and local is None:
        nodes, local = _whom(namespace)
    options: dict[str, Any] = {"namespace": namespace, "peers": tuple(peer or ())}
    with ExitStack() as stack:
        show = stack.enter_context(open_progress(silent=member))
        if local is not None:
            job = _invite(stack, local, quick=quick, namespace=namespace)
        if local is not None or member:
            options |= {"multicast": False, "known": False}
        results = _measure(nodes or local or 2, job, timeout, options, show, quick=quick)
    if json:
        from potluck.apps.cli.circle import print_json

        print_json(results.facts())
    elif not member:
        _print(results)


def _whom(namespace: str | None) -> tuple[int | None, int | None]:
    """All machines of the namespace; if there is but this one, two processes of it."""
    from potluck.backend.membership import Membership
    from potluck.net.namespace import NetworkNamespace

    roster = Membership.load(NetworkNamespace.load_or_create(namespace)).roster
    count = 0 if roster is None else len(roster.members)
    if count > 1:
        return count, None
    typer.echo(
        "potluck: No other machine is paired, so two processes of this one are measured; "
        "--nodes N waits for N machines in any case.",
        err=True,
    )
    return None, 2


def _invite(stack: ExitStack, count: int, *, quick: bool, namespace: str | None) -> str:
    """Start the other processes; the job at which they meet us."""
    import os

    from potluck.apps.cli.bench_local import colleagues

    job = f"{JOB} {os.getpid()}"
    options = ["--nodes", str(count), "--job", job]
    options += ["--quick"] * quick
    options += [] if namespace is None else ["--namespace", namespace]
    stack.enter_context(colleagues(count - 1, options))
    return job


def _measure(
    nodes: int,
    job: str,
    timeout: float,
    options: dict[str, Any],
    show: Callable[[str], None],
    *,
    quick: bool,
) -> Results:
    """Everything, together with the others."""
    from potluck.errors import PeerLost, Timeout, ViewChanged
    from potluck.runtime.joining import join

    show(f"waiting for {nodes} to be here")
    try:
        cluster = join(nodes, job=job, timeout=timeout, **options)
    except Timeout as error:
        typer.echo(f"potluck: {error}", err=True)
        typer.echo("Is `potluck bench` typed on the others too?", err=True)
        raise typer.Exit(TOO_FEW) from None
    with cluster:
        for _ in range(TRIES - 1):
            try:
                return _measure_once(cluster, show, quick=quick)
            except (ViewChanged, PeerLost) as error:  # all ranks are told, and begin anew
                if cluster.world_size < nodes:
                    raise
                typer.echo(f"potluck: {error}", err=True)
        return _measure_once(cluster, show, quick=quick)


def _measure_once(cluster: Cluster, show: Callable[[str], None], *, quick: bool) -> Results:
    import msgspec

    from potluck.apps.cli.bench_compression import measure_method, methods, slowest
    from potluck.apps.cli.bench_measuring import Effort, matrix_of, measure_cases, measure_links
    from potluck.apps.cli.bench_report import Results
    from potluck.runtime.auto_config import AutoDiscoveryConfig

    effort = Effort.quick() if quick else Effort()
    show("the links")
    links = measure_links(cluster, AutoDiscoveryConfig(job=JOB).node_name, effort)
    cases = measure_cases(cluster, matrix_of(links), effort, show)
    measured = []
    for method in methods():
        show(f"compression by {method}")
        measured.append(measure_method(method, quick=quick))
    told = cluster.all_gather_object([msgspec.to_builtins(each) for each in measured])
    cluster.barrier()  # nobody leaves while another still needs it
    return Results(links, cases, slowest(told))


def _print(results: Results) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    results.print(console)
