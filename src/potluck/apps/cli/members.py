"""``potluck members``: the machines of a group, and since when they belong to it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.common import Json, Member, Namespace, Yes
from potluck.apps.cli.output import console, print_json, print_line, table, working

if TYPE_CHECKING:
    from potluck._types import NodeId
    from potluck._version import Build
    from potluck.trust.membership_store import NamespaceMembership


EXAMPLES = """\
potluck members                             the machines of the group this machine uses
potluck members --namespace lab --json      the same for a program, of the group lab
potluck members --host desk:52416           asks the member at this address first
"""


def members(*, namespace: Namespace = None, host: Member = None, json: Json = False) -> None:
    """Show the machines of a group, former ones, and changes that wait for signatures."""
    from potluck.apps.cli.membership import kept_namespace, pending_facts, sync, this_machine
    from potluck.trust.membership_store import NamespaceMembership, require_roster

    kept = kept_namespace(namespace)
    require_roster(kept)
    membership = NamespaceMembership.as_it_is(sync(kept, host), this_machine())
    if json:
        print_json(
            {
                "namespace": membership.namespace.name,
                "generation": membership.roster.generation.number,
                "members": [_facts(membership, node_id) for node_id in _everybody(membership)],
                "pending": pending_facts(membership.roster),
            }
        )
    else:
        _print(membership)
        if host is None and len(membership.roster.members) > 1:
            typer.echo(ELSEWHERE)


ELSEWHERE = (
    "\nA machine that was paired elsewhere is listed once this one has met a machine that "
    "knows it: in a job, or with --host."
)


def _everybody(membership: NamespaceMembership) -> list[NodeId]:
    """Those who belong to it, by name, then those who did."""
    present = [member.node_id for member in membership.roster.members]
    former = {
        node_id: None
        for generation in membership.roster.history.generations
        for node_id in generation.members
        if node_id not in present
    }
    return [*present, *former]


def _facts(membership: NamespaceMembership, node_id: NodeId) -> dict[str, Any]:
    from potluck.identity.node import short_name

    member = membership.roster.generation.members.get(node_id)
    return {
        "name": membership.roster.history.names[node_id],
        "short_name": short_name(node_id),
        "id": node_id,
        "is_this_machine": node_id == membership.me.node_id,
        "status": membership.roster.status(node_id).value,
        "sponsors": sorted(member.sponsors) if member else [],
        "reason": membership.roster.explain(node_id),
        **_version_of(membership, node_id),
    }


def _version_of(membership: NamespaceMembership, node_id: NodeId) -> dict[str, Any]:
    """What a machine ran when this one last met it."""
    build = _builds(membership).get(node_id)
    return {
        "version": build.potluck if build else None,
        "protocol": build.protocol if build else None,
    }


def _builds(membership: NamespaceMembership) -> dict[NodeId, Build]:
    from potluck._version import THIS_BUILD
    from potluck.discovery.local import KnownPeers

    known = KnownPeers(membership.home).builds(membership.namespace)
    return {**known, membership.me.node_id: THIS_BUILD}


def _print(membership: NamespaceMembership) -> None:
    from rich.text import Text

    from potluck._version import mixed
    from potluck.apps.cli.membership import how_to_agree
    from potluck.trust.roster_records import ID_SHOWN, Status

    builds = _builds(membership)
    present = {each.name: builds.get(each.node_id) for each in membership.roster.members}
    mixture = mixed({name: build for name, build in present.items() if build is not None})
    columns = ["name", "also called", "id", "status", *["version last seen"] * bool(mixture)]
    to, found = console(), table(columns)
    for column in found.columns[1:3]:
        column.no_wrap = True
    for node_id in _everybody(membership):
        facts = _facts(membership, node_id)
        here = " This machine." if facts["is_this_machine"] else ""
        style = "" if facts["status"] == "member" else "dim"
        texts = (
            facts["name"],
            facts["short_name"],
            facts["id"][:ID_SHOWN],
            f"{facts['reason']}{here}",
            *[str(builds.get(node_id, ""))] * bool(mixture),
        )
        found.add_row(*(Text(text, style) for text in texts))
    print_line(to, f'Members of "{membership.namespace.name}":\n', "bold")
    to.print(found)
    if membership.roster.status(membership.me.node_id) is Status.STRANGER:
        print_line(to, f"\nThis machine ({membership.me.node_id}) is not in it.", "yellow")
    for change in membership.roster.pending:
        print_line(to, f"\n{change.reason}", "yellow")
        if membership.roster.objection(change.name, membership.me.node_id) is None:
            print_line(to, how_to_agree(change))


# --------------------------------------------------------------------------------------------------
# ``potluck pair``: two machines that share nothing but a short code become one group.

PAIR_EXAMPLES = """\
potluck pair                                first machine: shows a code such as 7-guitar-harbor
potluck pair 7-guitar-harbor                second machine: types it and joins the first
potluck pair 7-guitar-harbor --host desk    where machines cannot find each other
potluck pair 7-guitar-harbor --keep         joins, and stays in the group it is in
"""


def pair(
    code: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CODE", show_default=False, help="The code that the other machine shows."
        ),
    ] = None,
    *,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS[:PORT]", help="Address of the machine that shows the code."),
    ] = None,
    namespace: Namespace = None,
    yes: Yes = False,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Join another group, and stay in the one this machine is in."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="JSON objects on stdout instead, one for each event.")
    ] = False,
) -> None:
    """Pair two machines: show a one-time code, or type the one that the other machine shows.

    Without CODE this machine shows one and waits, for five minutes or three wrong tries.
    Typing it on another machine adds that machine to this one's group.  A machine that is already
    in a group with others asks before it leaves that group.
    """
    if code:
        if yes and keep:
            raise typer.BadParameter("--yes and --keep cannot be combined", param_hint="--keep")
        from potluck.apps.cli.pairing import PairOptions, join

        join(" ".join(code), PairOptions(host, namespace, leave=yes, keep=keep, json=json))
        return
    for given, option in ((host, "--host"), (yes, "--yes"), (keep, "--keep")):
        if given:
            raise typer.BadParameter(f"{option} requires a CODE", param_hint=option)
    from potluck.apps.cli.pairing import invite

    invite(namespace, json=json)


# --------------------------------------------------------------------------------------------------
# ``potluck revoke``: take a machine out of a group.

REVOKE_EXAMPLES = """\
potluck revoke laptop                     by its name
potluck revoke k3j5abcd --yes             by the beginning of its id, without a question
potluck revoke laptop --keep-guest nas    nas was brought in by laptop, and stays
"""


def revoke(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name, or its id's beginning.")],
    *,
    keep_guest: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE", help="A machine that it brought in and that stays.", show_default=False
        ),
    ] = None,
    namespace: Namespace = None,
    host: Member = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Take a machine out: propose a new secret that it does not get.

    With two machines in the group it takes effect at once.  With more, most of the others have to
    agree, each by this same command; until then it waits.  Machines that the revoked machine
    brought in are taken out too.
    """
    from potluck.apps.cli.membership import (
        change_secret,
        find_member,
        kept_namespace,
        report,
        sync,
        this_machine,
    )
    from potluck.trust.membership_store import NamespaceMembership

    before = NamespaceMembership.of(sync(kept_namespace(namespace), host), this_machine())
    target = find_member(before.roster, node)
    keeps = [find_member(before.roster, name).node_id for name in keep_guest or []]
    after = change_secret(
        before,
        f'Take {target.name} ({target.node_id}) out of "{before.namespace.name}"?',
        lambda roster, secret: roster.revoke(target.node_id, before.me, secret, keeps),
        revokes=target.node_id,
        keeps=keeps if keep_guest else None,
        yes=yes,
    )
    report(before, NamespaceMembership.of(sync(after.namespace, host), before.me), json=json)


# --------------------------------------------------------------------------------------------------
# ``potluck rotate``: give a group a new secret.

ROTATE_EXAMPLES = """\
potluck rotate                    a new secret for the group this machine uses
potluck rotate --namespace lab    for the group lab
"""


def rotate(
    *, namespace: Namespace = None, host: Member = None, yes: Yes = False, json: Json = False
) -> None:
    """Propose a new secret for everybody, for instance after a backup was lost.

    Most of the members have to agree, each by this same command; until then it waits and the old
    secret is in force.
    """
    from potluck.apps.cli.membership import (
        change_secret,
        kept_namespace,
        report,
        sync,
        this_machine,
    )
    from potluck.trust.membership_store import NamespaceMembership

    before = NamespaceMembership.of(sync(kept_namespace(namespace), host), this_machine())
    after = change_secret(
        before,
        f'Give "{before.namespace.name}" a new secret?',
        lambda roster, secret: roster.rotate(before.me, secret),
        yes=yes,
    )
    report(before, NamespaceMembership.of(sync(after.namespace, host), before.me), json=json)


# --------------------------------------------------------------------------------------------------
# ``potluck unpair``: this machine leaves a group.

UNPAIR_EXAMPLES = """\
potluck unpair        leaves the group this machine uses
potluck unpair lab    leaves the group lab
"""


def unpair(
    name: Annotated[
        str | None, typer.Argument(metavar="GROUP", show_default=False, help="Name of the group.")
    ] = None,
    *,
    namespace: Namespace = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Leave a group: forget its secret and its members on this machine.

    The others are not told.  They list this machine as a member until one of them revokes it.
    """
    from potluck.apps.cli.membership import confirm
    from potluck.identity.namespace import (
        NamespaceFiles,
        UnknownNamespace,
        stored_names,
        usual_name,
    )
    from potluck.identity.private_files import potluck_home

    home = potluck_home()
    # Not NetworkNamespace: what is damaged must be possible to leave.
    files = NamespaceFiles(home, name or namespace or usual_name(home))
    if files.name not in stored_names(home):
        names = ", ".join(stored_names(home)) or "none"
        raise UnknownNamespace(
            f"This machine is not in a group named {files.name!r}",
            got=files.name,
            hint=f"Those it is in: {names}.",
        )
    was_used = files.is_used
    confirm(f'Leave "{files.name}"? Coming back needs pairing again.', yes=yes)
    files.delete()
    if json:
        print_json({"left": files.name})
        return
    typer.echo(
        f'This machine has left "{files.name}": its secret and its member list are deleted here.'
    )
    if was_used:
        typer.echo(
            "The others still list it as a member. If it is lost or in other hands, or was copied "
            "before, run `potluck revoke` on one of them: only that changes the secret."
        )


# --------------------------------------------------------------------------------------------------
# ``potluck passphrase``: machines whose people agreed on a passphrase become one group.

PHRASE_EXAMPLES = """\
potluck passphrase lab                    asks for the passphrase, without showing it
potluck passphrase lab --stdin <words.txt    reads it from a file or a password manager
"""

VARIABLE = "POTLUCK_PASSPHRASE"

LONGEST = 4096
"""Characters that are read from stdin at most."""


def passphrase(
    name: Annotated[
        str,
        typer.Argument(metavar="GROUP", help="Name of the group; the same on every machine."),
    ],
    *,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Read the passphrase from the first line of stdin.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Join the group with this name and this passphrase; the first machine makes it.

    Do the same on every machine.  `potluck pair` does without a passphrase: it joins two machines
    by a one-time code, and only a group made that way can take a machine out again.

    The passphrase is asked for, or read from stdin, or from POTLUCK_PASSPHRASE.  It is never an
    argument: those are visible to every user of the machine.  What is kept is a key made from it.
    """
    from potluck.apps.cli.membership import confirm
    from potluck.identity.namespace import NamespaceFiles, NetworkNamespace, checked_name
    from potluck.identity.private_files import potluck_home

    home = potluck_home()
    checked = checked_name(name)
    given = _read(stdin=stdin)
    with working("Making the key"):
        namespace = NetworkNamespace.from_passphrase(checked, given, home=home)
    files = NamespaceFiles(home, checked)
    kept = files.maybe_read()
    is_member = kept is not None and kept.is_passphrase and namespace.has_secret(kept.current)
    if not is_member:
        if kept is not None and files.is_used:
            confirm(f'Leave the present "{checked}" for the one with this passphrase?', yes=yes)
        namespace.save(replace=True)
        namespace.mark_used()
    if json:
        print_json({"namespace": checked, "tag": namespace.discovery_tag, "new": not is_member})
        return
    state = "was already in" if is_member else "is now in"
    typer.echo(f'This machine {state} "{checked}", with all machines that have this passphrase.')
    typer.echo(f"Start programs there with POTLUCK_NAMESPACE={checked} or --namespace {checked}.")


def _read(*, stdin: bool) -> str:
    """The passphrase, from where it is safe to read."""
    from potluck.apps.cli.membership import CannotAsk, can_ask

    variable = os.environ.get(VARIABLE, "")
    if stdin and variable:
        raise typer.BadParameter(f"{VARIABLE} is set as well: use one", param_hint="--stdin")
    if stdin:
        found = sys.stdin.readline(LONGEST).strip("\r\n")
    elif variable:
        found = variable
    elif can_ask():
        found = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
    else:
        raise CannotAsk(
            "The passphrase cannot be asked for: this is not a terminal",
            hint=f"Pass it on stdin with --stdin, or in {VARIABLE}.",
        )
    if not found.strip():
        raise typer.BadParameter("the passphrase is empty", param_hint="--stdin" if stdin else None)
    return found
