"""``potluck members``: who belongs to a namespace, and since when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from potluck.apps.cli.options import Json, Member, Namespace

if TYPE_CHECKING:
    from potluck.backend.circles import Circle
    from potluck.vocabulary import NodeId

__all__ = ["EXAMPLES", "members"]

EXAMPLES = """\
potluck members                             everybody in the namespace this machine uses
potluck members --namespace lab --json      the same for a program, of another namespace
potluck members --host desk:29500           first asks the member whose program runs there
"""

WIDE = 160
"""Columns where there is no terminal to fit into: nothing is cut off in a file."""


def members(*, namespace: Namespace = None, host: Member = None, json: Json = False) -> None:
    """Show who belongs to a namespace, who did, and which changes wait for signatures."""
    from potluck.apps.cli.circle import (
        kept_namespace,
        pending_facts,
        print_json,
        sync,
        this_machine,
    )
    from potluck.backend.circles import Circle, require_roster

    kept = kept_namespace(namespace)
    require_roster(kept)
    circle = Circle.as_it_is(sync(kept, host), this_machine())
    if json:
        print_json(
            {
                "namespace": circle.namespace.name,
                "generation": circle.roster.generation.number,
                "members": [_facts(circle, node_id) for node_id in _everybody(circle)],
                "pending": pending_facts(circle.roster),
            }
        )
    else:
        _print(circle)


def _everybody(circle: Circle) -> list[NodeId]:
    """Those who belong to it, by name, then those who did."""
    present = [member.node_id for member in circle.roster.members]
    former = {
        node_id: None
        for generation in circle.roster.history.generations
        for node_id in generation.members
        if node_id not in present
    }
    return [*present, *former]


def _facts(circle: Circle, node_id: NodeId) -> dict[str, Any]:
    from potluck.net.names import short_name

    member = circle.roster.generation.members.get(node_id)
    return {
        "name": circle.roster.history.names[node_id],
        "short_name": short_name(node_id),
        "id": node_id,
        "is_this_machine": node_id == circle.me.node_id,
        "status": circle.roster.status(node_id).value,
        "sponsors": sorted(member.sponsors) if member else [],
        "reason": circle.roster.explain(node_id),
    }


def _print(circle: Circle) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from potluck.apps.cli.change import how_to_agree
    from potluck.core.roster_history import ID_SHOWN, Status

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("name")
    table.add_column("also called", no_wrap=True)
    table.add_column("id", no_wrap=True)
    table.add_column("status")
    for node_id in _everybody(circle):
        facts = _facts(circle, node_id)
        here = " This is it." if facts["is_this_machine"] else ""
        style = "" if facts["status"] == "member" else "dim"
        texts = (
            facts["name"],
            facts["short_name"],
            facts["id"][:ID_SHOWN],
            f"{facts['reason']}{here}",
        )
        table.add_row(*(Text(text, style) for text in texts))
    console.print(Text(f'Members of "{circle.namespace.name}":\n', "bold"))
    console.print(table)
    if circle.roster.status(circle.me.node_id) is Status.STRANGER:
        console.print(Text(f"\nThis machine ({circle.me.node_id}) is none of them.", "yellow"))
    for change in circle.roster.pending:
        console.print(Text(f"\n{change.reason}", "yellow"), soft_wrap=not console.is_terminal)
        if circle.roster.objection(change.name, circle.me.node_id) is None:
            console.print(Text(how_to_agree(change)), soft_wrap=not console.is_terminal)
