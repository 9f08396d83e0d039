"""``potluck bench``: how fast this cluster is, and what would make it faster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.common import Json, Namespace, Peer
from potluck.apps.cli.output import console, open_display, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from potluck.apps.cli.bench_measure import Results
    from potluck.cluster.cluster import Cluster


EXAMPLES = """\
potluck bench                     on each machine; begins when all of the group are there
potluck bench --nodes 2 --quick   begins when two are there, and takes a few seconds
potluck bench --local 3           three processes of this machine
potluck bench --explain           also says which plan runs, and what it was compared with
"""

EXIT_CODES = (
    "Exit codes: 0 measured, 1 failed (the reason is on stderr), 2 wrong usage, "
    "3 not enough machines came in time, 130 interrupted."
)

TOO_FEW = 3

LOOKING = 1.5
"""Seconds to see who waits as well, after waiting in vain."""

TRIES = 3
"""Measurements that are begun if machines come or go meanwhile."""

JOB = "potluck bench"
"""The job of a measurement: only processes that measure join it."""


def bench(
    *,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=2, help="Number of machines to wait for.", show_default="all of the group"
        ),
    ] = None,
    local: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=64,
            help="Measure N processes of this machine instead.",
            show_default="2 where no other machine is paired",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, less exact.")] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Also say which plan runs, why, and what was compared."),
    ] = False,
    namespace: Namespace = None,
    peer: Peer = None,
    timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Give up waiting after N seconds.")
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
    measured = {each.name for each in results.links}
    absent = [] if local else [each for each in _members(namespace) if each not in measured]
    if json:
        print_json(results.facts() | {"absent": absent})
    elif not member:
        _print(results, absent)
        if explain:
            for line in results.explain():
                typer.echo(line)


def _whom(namespace: str | None) -> tuple[int | None, int | None]:
    """All machines of the group; two processes of this one if it is alone."""
    count = len(_members(namespace))
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
    from potluck.cluster.cluster import join
    from potluck.errors import PeerLost, Timeout, ViewChanged

    show(f"waiting until {nodes} are here")
    try:
        cluster = join(nodes, job=job, timeout=timeout, **options)
    except Timeout:
        typer.echo(f"potluck: {_who_is_missing(nodes, job, timeout, options)}", err=True)
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


def _members(namespace: str | None) -> list[str]:
    """The names of the machines of the namespace; none where no list of them is kept."""
    from potluck.identity.namespace import NetworkNamespace
    from potluck.trust.membership_store import TrustStore

    roster = TrustStore.load(NetworkNamespace.load_or_create(namespace)).roster
    return [] if roster is None else [each.name for each in roster.members]


def _who_is_missing(nodes: int, job: str, timeout: float, options: dict[str, Any]) -> str:
    """Who came in time, and who did not, as far as can be seen."""
    from potluck.apps.cli.status import look_around
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.observer import Observer

    config = AutoDiscoveryConfig(job=job, **options)
    with Observer(config, job=job) as observer:
        found = {each.name for each in look_around(observer, LOOKING) if each.role == "member"}
    here = sorted({config.node_name, *found})
    text = f"Gave up after {timeout:g} s: {len(here)} of {nodes} came ({', '.join(here)})"
    missing = [each for each in _members(options["namespace"]) if each not in here]
    if not missing:
        return f"{text}. Run `potluck bench` on the other machines as well."
    return f"{text}; missing: {', '.join(missing)}. Run `potluck bench` there as well."


def _measure_once(cluster: Cluster, show: Callable[[str], None], *, quick: bool) -> Results:
    import msgspec

    from potluck.apps.cli.bench_measure import (
        BenchDuration,
        Results,
        matrix_of,
        measure_cases,
        measure_links,
        measure_method,
        methods,
        slowest,
    )
    from potluck.cluster.config import AutoDiscoveryConfig

    effort = BenchDuration.quick() if quick else BenchDuration()
    show("the links")
    links = measure_links(cluster, AutoDiscoveryConfig(job=JOB).node_name, effort)
    cases = measure_cases(cluster, matrix_of(links), effort, show)
    measured = []
    for method in methods():
        show(f"compression by {method}")
        measured.append(measure_method(method, quick=quick))
    told = cluster.all_gather_object([msgspec.to_builtins(each) for each in measured])
    cluster.barrier()  # nobody leaves while another still needs it
    return Results(links, cases, slowest(told), cluster.group.links)


def _print(results: Results, absent: list[str]) -> None:
    results.print(console())
    if absent:
        typer.echo(f"Not measured, because they did not take part: {', '.join(absent)}.")


# --------------------------------------------------------------------------------------------------
# How far a measurement is: a moving line in a terminal, a few lines elsewhere; on stderr.


class _Progress:
    """What is measured now, for a display."""

    def __init__(self) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, auto_refresh=False)
        self._task = self._progress.add_task("", total=None)
        self._what = ""

    def tell(self, what: str) -> None:
        self._what = what
        self._progress.update(self._task, description=what)

    def draw(self) -> RenderableType:
        return self._progress

    def line(self) -> str:
        """One for each part, not for each step of it."""
        return "the algorithms" if " on " in self._what else self._what.partition(" by ")[0]

    def facts(self) -> None:
        """Programs get the results."""


@contextmanager
def open_progress(*, silent: bool = False) -> Iterator[Callable[[str], None]]:
    """A function that is told at every step what comes now."""
    progress = _Progress()
    with open_display(
        console(stderr=True), quiet=silent, prefix="potluck: ", transient=True, moving=True
    ) as display:

        def show(what: str) -> None:
            progress.tell(what)
            display.show(progress)

        yield show


# --------------------------------------------------------------------------------------------------
# Further processes of this machine for ``potluck bench``: started, and ended for certain.

PROGRAM = "from potluck.apps.cli.main import app; app(prog_name='potluck')"

ENDING = 5.0
"""Seconds for a process to end that was told to."""


@contextmanager
def colleagues(count: int, options: Sequence[str]) -> Iterator[None]:
    """Start this many more processes of the same measurement; end them at the end."""
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
