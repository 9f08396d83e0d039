"""``potluck bench``: how fast this cluster is, and what would make it faster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.common import Json, Namespace

if TYPE_CHECKING:
    from potluck.apps.cli.bench_measure import Results
    from potluck.cluster.cluster import Cluster


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
        from potluck.apps.cli.membership import print_json

        print_json(results.facts())
    elif not member:
        _print(results)


def _whom(namespace: str | None) -> tuple[int | None, int | None]:
    """All machines of the namespace; if there is but this one, two processes of it."""
    from potluck.identity.namespace import NetworkNamespace
    from potluck.trust.membership_store import Membership

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
    from potluck.cluster.backend import join
    from potluck.errors import PeerLost, Timeout, ViewChanged

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

    from potluck.apps.cli.bench_measure import (
        Effort,
        Results,
        matrix_of,
        measure_cases,
        measure_links,
        measure_method,
        methods,
        slowest,
    )
    from potluck.cluster.config import AutoDiscoveryConfig

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


# --------------------------------------------------------------------------------------------------
# How far a measurement is: a moving line in a terminal, a few lines elsewhere; on stderr.


@contextmanager
def open_progress(*, silent: bool = False) -> Iterator[Callable[[str], None]]:
    """A function that is told at every step what comes now."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if silent:
        yield lambda _what: None
    elif console.is_terminal and not console.is_dumb_terminal:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=None)
            yield lambda what: progress.update(task, description=what)
    else:
        yield _lines()


def _lines() -> Callable[[str], None]:
    """One line for each part, not for each step of it."""
    import typer

    last = ""

    def show(what: str) -> None:
        nonlocal last
        part = "the algorithms" if " on " in what else what.partition(" by ")[0]
        if part != last:
            last = part
            typer.echo(f"potluck: {part}", err=True)

    return show


# --------------------------------------------------------------------------------------------------
# Further processes of this machine for ``potluck bench``: started, and ended for certain.

PROGRAM = "from potluck.apps.cli.main import app; app(prog_name='potluck')"

ENDING = 5.0
"""Seconds for a process to end that was told to."""


@contextmanager
def colleagues(count: int, options: Sequence[str]) -> Iterator[None]:
    """So many more processes of the same measurement; they are gone at the end."""
    command = [sys.executable, "-c", PROGRAM, "bench", "--member", *options]
    started = [
        subprocess.Popen(  # noqa: S603 - this very program
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(count)
    ]
    is_done = False
    try:
        yield
        is_done = True
    finally:
        for process in started:
            _end(process, is_done=is_done)


def _end(process: subprocess.Popen[bytes], *, is_done: bool) -> None:
    """It ends by itself when all is done; otherwise at once."""
    if not is_done:
        process.terminate()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
