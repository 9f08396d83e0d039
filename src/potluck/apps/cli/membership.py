"""What the commands about members share: this machine's group, and how machines are shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from potluck._types import NodeId
from potluck.apps.cli.output import list_names, print_json, working
from potluck.errors import DistributedError, from_os_error
from potluck.identity.namespace import NetworkNamespace, Protection, usual_name
from potluck.identity.node import NodeIdentity, short_name
from potluck.identity.private_files import potluck_home
from potluck.trust.membership_store import NamespaceMembership
from potluck.trust.roster import PendingRotation, Roster
from potluck.trust.roster_records import ID_SHOWN, Card, RosterMember, Signer, Status

SYNC_WITHIN = 10.0
"""Seconds for reaching a member that was named."""


class CannotAsk(DistributedError, RuntimeError):
    """A question came up where no person can answer it."""


def this_machine() -> Signer:
    """Who we are."""
    from potluck.trust.membership_store import signer_of

    return signer_of(NodeIdentity.load_or_generate())


def kept_namespace(name: str | None) -> NetworkNamespace:
    """The group with this name; raises if this machine is not in it."""
    home = potluck_home()
    return NetworkNamespace.load(name or usual_name(home), home=home)


def known_name(name: str | None) -> str | None:
    """The name of a group to look at, which looking shall not create."""
    keyless = {Protection.OPEN.value, Protection.INSECURE.value}
    if name is not None and name.strip().lower() not in keyless:
        NetworkNamespace.load(name)  # raises where there is none
    return name


def sync(namespace: NetworkNamespace, host: str | None) -> NetworkNamespace:
    """Agree with a running member on who belongs; the namespace as it is then.

    Without ``host`` nothing happens: members agree whenever their programs connect.
    """
    if host is None:
        return namespace
    import contextlib
    import socket
    import time

    from potluck.net.addresses import parse_address
    from potluck.trust.connect import OutgoingCall, SecretChanged, dial, say_hello
    from potluck.trust.membership_store import TrustStore
    from potluck.wire_messages import OpenReply, Sync

    try:
        where = parse_address(host)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--host") from None
    members = TrustStore.load(namespace)
    deadline = time.monotonic() + SYNC_WITHIN
    try:
        with working(f"Asking {host}"):
            sock = dial(members, OutgoingCall(where, deadline))
    except DistributedError:
        raise
    except socket.gaierror as error:
        raise from_os_error(f"{host} could not be reached", error) from error
    except OSError as error:
        hint = "Check that a program of a member runs there, and that no firewall is in between."
        raise from_os_error(f"{host} could not be reached", error, hint=hint) from error
    with contextlib.closing(sock), contextlib.suppress(SecretChanged):
        say_hello(sock, Sync(), OpenReply, members, deadline)
    return NetworkNamespace.load(namespace.name, home=namespace.home)


def describe(card: Card) -> str:
    """A machine by all its names; the id is what counts."""
    return f"{card.name} is {short_name(card.node_id)}, with the id {card.node_id}."


def facts_of(card: Card) -> dict[str, str]:
    """The same for a program."""
    return {"name": card.name, "short_name": short_name(card.node_id), "id": card.node_id}


def pending_facts(roster: Roster) -> list[dict[str, Any]]:
    """The changes that wait for signatures, for a program."""
    return [
        {
            "revokes": change.rotation.revokes,
            "proposer": change.rotation.proposer,
            "reason": change.reason,
        }
        for change in roster.pending
    ]


def can_ask() -> bool:
    """Whether a person sits at the other end."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Continue only if the person agrees, or has agreed beforehand."""
    if yes:
        return
    if not can_ask():
        raise CannotAsk(question, hint="There is no terminal to ask on; to agree, add --yes.")
    typer.confirm(question, abort=True, err=True)


# --------------------------------------------------------------------------------------------------
# What revoking and rotating share: which machine is meant, and what came of it, in words.

SHORTEST = 4
"""Letters of an id that may stand for it."""


class UnknownMember(DistributedError, LookupError):
    """No machine of the group has that name, or several do."""


def find_member(roster: Roster, text: str) -> RosterMember:
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
    raise UnknownMember(
        problem,
        got=text,
        hint=f"Give {'its whole id' if found else 'a name or an id'}. The members are: {ids}.",
    )


def _is_called(node_id: NodeId, name: str, wanted: str) -> bool:
    is_beginning = len(wanted) >= SHORTEST and node_id.startswith(wanted)
    return is_beginning or wanted in {name.casefold(), short_name(node_id)}


def change_secret(
    membership: NamespaceMembership,
    question: str,
    propose: Callable[[Roster, bytes], Roster],
    *,
    revokes: NodeId | None = None,
    keeps: list[NodeId] | None = None,
    yes: bool,
) -> NamespaceMembership:
    """Propose a new secret, or agree to the same change that another machine proposed."""
    for change in membership.roster.pending:
        is_same = change.rotation.revokes == revokes and (
            keeps is None or set(keeps) == set(change.rotation.keeps)
        )
        if is_same and membership.roster.objection(change.name, membership.me.node_id) is None:
            return agree(membership, change, yes=yes)
    confirm(question, yes=yes)
    return membership.propose(propose)


def agree(
    membership: NamespaceMembership, change: PendingRotation, *, yes: bool
) -> NamespaceMembership:
    """Sign what another machine proposed, if the person wants it; names everybody who would go."""
    roster = membership.roster
    staying = roster.members_after(change.name)
    going = [
        f"{member.name} ({member.node_id})"  # names alone may mislead
        for member in roster.members
        if member.node_id not in staying
    ]
    what = f"takes out {list_names(going)}" if going else "takes out no machine"
    proposer = roster.history.name_of(change.rotation.proposer)
    name = membership.namespace.name
    confirm(f'Agree to the new secret of "{name}" that {proposer} proposed? It {what}.', yes=yes)
    return membership.sign(change.name)


def how_to_agree(change: PendingRotation) -> str:
    """Which command signs a change that waits for this machine too.

    By id: names need not be unique, and what others chose is nothing to put into a shell.
    """
    revoked = change.rotation.revokes
    command = f"revoke {revoked[:ID_SHOWN]}" if revoked else "rotate"
    return f"To agree, on this machine: potluck {command}"


def report(before: NamespaceMembership, after: NamespaceMembership, *, json: bool) -> None:
    """Say what a proposal has changed, and what it has not."""
    took_effect = after.roster.generation.number > before.roster.generation.number
    if json:
        print_json(_facts(before, after, took_effect=took_effect))
        return
    sentences = _in_force(before, after) if took_effect else _waiting(after)
    typer.echo("\n".join(sentences))


def _facts(
    before: NamespaceMembership, after: NamespaceMembership, *, took_effect: bool
) -> dict[str, Any]:
    return {
        "namespace": after.namespace.name,
        "took_effect": took_effect,
        "generation": after.roster.generation.number,
        "out": [member.node_id for member in _out(before, after)],
        "pending": pending_facts(after.roster),
    }


def _in_force(before: NamespaceMembership, after: NamespaceMembership) -> list[str]:
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


def _waiting(after: NamespaceMembership) -> list[str]:
    return [
        "Nothing has changed yet; the proposal is signed by this machine and kept here.",
        *(change.reason for change in after.roster.pending),
        "They hear of it when programs connect; then the same command on each of them signs.",
        "Until enough have signed, all members stay and the old secret is in force.",
    ]


def _out(before: NamespaceMembership, after: NamespaceMembership) -> list[RosterMember]:
    return [
        member
        for member in before.roster.members
        if after.roster.status(member.node_id) is not Status.MEMBER
    ]
