"""What revoking and rotating share: which machine is meant, and what came of it, in words."""

from __future__ import annotations

from typing import Any

import typer

from potluck.apps.cli.circle import confirm, pending_facts, print_json
from potluck.backend.circles import Circle
from potluck.core.roster import Member, Pending, Roster, Status
from potluck.core.roster_history import ID_SHOWN
from potluck.core.roster_words import listed
from potluck.errors import DistributedError
from potluck.net.names import short_name
from potluck.vocabulary import NodeId

__all__ = ["UnknownMember", "agree", "find_member", "find_proposal", "how_to_agree", "report"]

SHORTEST = 4
"""Letters of an id that may stand for it."""


class UnknownMember(DistributedError, LookupError):
    """Nobody in the circle is called that, or several are."""


def find_member(roster: Roster, text: str) -> Member:
    """The member meant by a name, a readable name, an id or its beginning.

    A whole id means that machine and no other; all else must mean one machine, since anybody may
    choose a name that looks like the beginning of another's id.
    """
    wanted = text.strip().casefold()
    if member := roster.generation.members.get(NodeId(wanted)):
        return member
    found = [each for each in roster.members if _is_called(each.node_id, each.name, wanted)]
    if len(found) == 1:
        return found[0]
    for node_id, name in roster.history.names.items():
        if not found and _is_called(node_id, name, wanted):
            raise UnknownMember(roster.explain(node_id), got=text)
    ids = ", ".join(f"{member.name} {member.node_id}" for member in found or roster.members)
    problem = f"Several members are called {text!r}" if found else f"No member is called {text!r}"
    raise UnknownMember(problem, got=text, hint=f"Give its whole id. These are there: {ids}.")


def _is_called(node_id: NodeId, name: str, wanted: str) -> bool:
    is_beginning = len(wanted) >= SHORTEST and node_id.startswith(wanted)
    return is_beginning or wanted in {name.casefold(), short_name(node_id)}


def find_proposal(
    circle: Circle, revokes: NodeId | None, keeps: list[NodeId] | None = None
) -> Pending | None:
    """The change with the same aim that another machine proposed and this one may agree to."""
    for change in circle.roster.pending:
        is_same = change.rotation.revokes == revokes and (
            keeps is None or set(keeps) == set(change.rotation.keeps)
        )
        if is_same and circle.roster.objection(change.name, circle.me.node_id) is None:
            return change
    return None


def agree(circle: Circle, change: Pending, *, yes: bool) -> Circle:
    """Sign what another machine proposed, if the person wants it; names everybody who would go."""
    roster = circle.roster
    staying = roster.heirs(change.name)
    going = [
        f"{member.name} ({member.node_id})"  # names alone may mislead
        for member in roster.members
        if member.node_id not in staying
    ]
    what = f"takes out {listed(going)}" if going else "takes out nobody"
    proposer = roster.history.name_of(change.rotation.proposer)
    name = circle.namespace.name
    confirm(f'Agree to the new secret of "{name}" that {proposer} proposed? It {what}.', yes=yes)
    return circle.sign(change.name)


def how_to_agree(change: Pending) -> str:
    """Which command signs a change that waits for this machine too.

    By id: names need not be unique, and what others chose is nothing to put into a shell.
    """
    revoked = change.rotation.revokes
    command = f"revoke {revoked[:ID_SHOWN]}" if revoked else "rotate"
    return f"To agree, on this machine: potluck {command}"


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
    sentence = f'"{after.namespace.name}" has a new secret on this machine.'
    if not after.has_secret:
        sentence = (
            f'"{after.namespace.name}" gets a new secret: enough machines have agreed. This one '
            "has it as soon as it connects to one that does."
        )
    return [
        sentence,
        *(after.roster.explain(member.node_id) for member in _out(before, after)),
    ]


def _waiting(after: Circle) -> list[str]:
    return [
        "Nothing has changed yet; the proposal is signed by this machine and kept here.",
        *(change.reason for change in after.roster.pending),
        "They hear of it when programs connect; then the same command on each of them signs.",
        "Until enough have signed, all members stay and the old secret is in force.",
    ]


def _out(before: Circle, after: Circle) -> list[Member]:
    return [
        member
        for member in before.roster.members
        if after.roster.status(member.node_id) is not Status.MEMBER
    ]
