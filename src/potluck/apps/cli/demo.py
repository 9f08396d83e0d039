"""``potluck demo``: nodes find each other and train; one is killed, and comes back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from potluck.apps.cli.common import Json, end_by_signals
from potluck.apps.cli.output import (
    console,
    open_display,
    print_json,
    print_line,
    replace_missing_signs,
    size,
)

EXAMPLES = """\
potluck demo                       three nodes, less than a minute
potluck demo --nodes 5 --kill 0    kill rank 0, the leader
potluck demo --json | jq .noticed  how fast the others noticed it
"""

EXIT_CODES = (
    "Exit codes: 0 everything worked, 1 it did not (the reason is on stderr), "
    "2 wrong usage, 130 interrupted."
)

MOST = 16
"""Nodes; more of them would only keep one machine busy."""


def demo(
    *,
    nodes: Annotated[int, typer.Option(min=2, max=MOST, help="Number of nodes.")] = 3,
    steps: Annotated[
        int, typer.Option(min=4, max=100_000, help="Number of training steps, at least.")
    ] = 240,
    kill: Annotated[
        int | None,
        typer.Option(min=0, help="Rank of the node to kill.", show_default="the last"),
    ] = None,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Kill no node.")] = False,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="Give up after N seconds.")
    ] = 110.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed for the data and initial weights.")
    ] = 0,
    json: Json = False,
) -> None:
    """Watch a small group of nodes on this machine lose one while they train, and get it back.

    The nodes are processes that find each other, train one model and average gradients over
    encrypted connections, as they would between machines.  One is killed; the others notice it,
    continue without it, and let it in again.  Then the same training runs undisturbed, to compare.
    Your own groups and files are not touched.  Needs neither torch nor a second machine.
    """
    from potluck.apps.cli.demo_story import Demo

    victim = nodes - 1 if kill is None else kill
    if victim >= nodes:
        raise typer.BadParameter(f"there are only ranks 0 to {nodes - 1}", param_hint="--kill")
    end_by_signals()
    replace_missing_signs(sys.stdout)
    to = console()
    with open_display(to, quiet=json, every=1.0) as display:
        rank = None if no_kill else victim
        facts = Demo(display, nodes, steps, seed, rank, seconds).run()
    wrong = problems(facts)
    if json:
        print_json({**facts, "problems": wrong, "held": not wrong})
    else:
        for sentence in ("", *summary(facts)):
            print_line(to, sentence)
    if wrong:
        typer.echo(f"potluck: The demo failed: {'; '.join(wrong)}.", err=True)
        raise typer.Exit(1)


# --------------------------------------------------------------------------------------------------
# What the demo found out.


def problems(facts: dict[str, Any]) -> list[str]:
    """What did not work; empty if everything did."""
    story, plain = facts["story"], facts["undisturbed"]
    found = []
    for name, run in (("disturbed", story), ("undisturbed", plain)):
        if len(set(run["fingerprints"].values())) > 1:
            found.append(f"the parameters after the {name} run differ: {run['fingerprints']}")
        if lost := run["missing_samples"]:
            found.append(f"{lost:,.0f} samples of the {name} run were lost or counted twice")
    if facts["difference"] > facts["noise"]:
        found.append(
            f"the losses differ by {facts['difference']:.4f}, which is more than the "
            f"{facts['noise']:.4f} between single batches"
        )
    return found


def summary(facts: dict[str, Any]) -> Iterator[str]:
    """The results in sentences."""
    story, plain = facts["story"], facts["undisturbed"]
    yield (
        f"Loss after {story['steps']:,} steps: {story['loss']:.4f}, undisturbed "
        f"{plain['loss']:.4f}. They differ by {facts['difference']:.4f}, single "
        f"batches by up to {facts['noise']:.4f}."
    )
    yield (
        f"{story['samples']:,.0f} samples counted, each once per epoch. "
        f"{story['accuracy']:.1%} of unseen points are put on the right spiral."
    )
    yield (
        f"Each node averaged up to {size(facts['averaged_bytes'])} of gradients in both runs. The "
        f"undisturbed run made {plain['steps'] / plain['seconds']:,.0f} steps/s."
    )
    if not problems(facts):
        count = len(facts["nodes"])
        which = f"All {count} nodes" if count > 2 else "Both nodes"  # noqa: PLR2004
        fingerprint = next(iter(story["fingerprints"].values()))
        yield f"{which} have the same parameters, bit for bit ({fingerprint})."
