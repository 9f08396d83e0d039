"""What revoking and rotating share: which machine is meant, and what came of it, in words."""

from __future__ import annotations

from typing import Any

import typer

from potluck.apps.cli.circle import pending_facts, print_json
from potluck.core.roster import Member, Roster, Status
from potluck.errors import DistributedError
from potluck.net.names import short_name
from potluck.runtime.circles import Circle

__all__ = ["UnknownMember", "find_member", "report"]

SHORTEST = 4
"""Letters of an id that may stand for it."""


class UnknownMember(DistributedError, LookupError):
    """Nobody in the circle is called that, or several are."""


def find_member(roster: Roster, text: str) -> Member:
    """The member meant by a name, a readable name, an id or its beginning."""
    wanted = text.strip().casefold()
    found = [
        member
        for member in roster.members
        if wanted in {member.name.casefold(), short_name(member.node_id), member.node_id}
    ] or [
        member
        for member in roster.members
        if len(wanted) >= SHORTEST and member.node_id.startswith(wanted)
    ]
    if len(found) == 1:
        return found[0]
    ids = ", ".join(f"{member.name} {member.node_id}" for member in found or roster.members)
    problem = f"Several members are called {text!r}" if found else f"No member is called {text!r}"
    raise UnknownMember(problem, got=text, hint=f"Give its id. These are there: {ids}.")


def report(before: Circle, after: Circle, *, json: bool) -> None:
    """Say what a proposal has changed, and what it has not."""
    took_effect = after.roster.generation.number > before.roster.generation.number
    if json:
        print_json(_facts(before, after, took_effect=took_effect))
        return
    sentences = _in_force(before, after) if took_effect else _waiting(after)
    typer.echo("\n".join(sentences))


def _facts(before: Circle, after: Circle, *, took_effect: bool) -> dict[str, Any]:
    return {
        "namespace": after.namespace.name,
        "took_effect": took_effect,
        "generation": after.roster.generation.number,
        "out": [member.node_id for member in _out(before, after)],
        "pending": pending_facts(after.roster),
    }


def _in_force(before: Circle, after: Circle) -> list[str]:
    # That happens only where nobody else has a vote, so there is nobody to get the new secret.
    return [
        f'"{after.namespace.name}" has a new secret on this machine.',
        *(after.roster.explain(member.node_id) for member in _out(before, after)),
    ]


def _waiting(after: Circle) -> list[str]:
    return [
        "Nothing has changed yet; the proposal is signed by this machine and kept here.",
        *(change.reason for change in after.roster.pending),
        "This version does not carry proposals to the others by itself.",
        "Until they have signed, all members stay and the old secret is in force.",
    ]


def _out(before: Circle, after: Circle) -> list[Member]:
    return [
        member
        for member in before.roster.members
        if after.roster.status(member.node_id) is not Status.MEMBER
    ]
