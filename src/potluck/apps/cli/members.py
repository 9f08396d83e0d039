"""``potluck members``: who belongs to a namespace, and since when."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.common import Json, Member, Namespace, Yes

if TYPE_CHECKING:
    from potluck._types import NodeId
    from potluck.trust.membership_store import Circle


EXAMPLES = """\
potluck members                             everybody in the namespace this machine uses
potluck members --namespace lab --json      the same for a program, of another namespace
potluck members --host desk:29500           first asks the member whose program runs there
"""

WIDE = 160
"""Columns where there is no terminal to fit into: nothing is cut off in a file."""


def members(*, namespace: Namespace = None, host: Member = None, json: Json = False) -> None:
    """Show who belongs to a namespace, who did, and which changes wait for signatures."""
    from potluck.apps.cli.membership import (
        kept_namespace,
        pending_facts,
        print_json,
        sync,
        this_machine,
    )
    from potluck.trust.membership_store import Circle, require_roster

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
    from potluck.identity.node import short_name

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

    from potluck.apps.cli.membership import how_to_agree
    from potluck.trust.roster_records import ID_SHOWN, Status

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


# --------------------------------------------------------------------------------------------------
# ``potluck pair``: two machines that share nothing but a short code become one circle.

PAIR_EXAMPLES = """\
potluck pair                                first machine: shows a code such as 7-guitar-harbor
potluck pair 7-guitar-harbor                second machine: types it and joins the first
potluck pair 7-guitar-harbor --host desk    where machines cannot find each other
potluck pair 7-guitar-harbor --keep         joins, and stays in the namespace it is in
"""


def pair(
    code: Annotated[
        list[str] | None,
        typer.Argument(metavar="CODE", show_default=False, help="What the other machine shows."),
    ] = None,
    *,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS[:PORT]", help="Where the machine is that shows the code."),
    ] = None,
    namespace: Namespace = None,
    yes: Yes = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Join beside the namespace this machine is in.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="JSON objects on stdout instead, one for each event.")
    ] = False,
) -> None:
    """Bring two machines together: show a one-time code, or type the one that another shows.

    Without CODE this machine shows one and waits, for five minutes or three wrong tries; whoever
    types it on another machine lets that machine into this one's namespace.  A machine that is in
    a namespace with others asks before it leaves that.
    """
    if code:
        if yes and keep:
            raise typer.BadParameter("it leaves or it keeps the other one", param_hint="--keep")
        from potluck.apps.cli.pairing import Wishes, join

        join(" ".join(code), Wishes(host, namespace, leave=yes, keep=keep, json=json))
        return
    for given, option in ((host, "--host"), (yes, "--yes"), (keep, "--keep")):
        if given:
            raise typer.BadParameter("it goes with a CODE", param_hint=option)
    from potluck.apps.cli.pairing import invite

    invite(namespace, json=json)


# --------------------------------------------------------------------------------------------------
# ``potluck revoke``: take a machine out of a namespace.

REVOKE_EXAMPLES = """\
potluck revoke laptop                     by its name
potluck revoke k3j5abcd --yes             by the beginning of its id, without a question
potluck revoke laptop --keep-guest nas    nas was brought in by laptop and shall stay
"""


def revoke(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name, or its id's beginning.")],
    *,
    keep_guest: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="Somebody it brought in who stays.", show_default=False),
    ] = None,
    namespace: Namespace = None,
    host: Member = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Take a machine out: propose a new secret that it does not get.

    With two machines in the namespace it takes effect at once.  With more, most of the others
    have to agree, each by this same command; until then it waits.  Whoever is there only through
    the revoked machine goes too.
    """
    from potluck.apps.cli.membership import (
        agree,
        confirm,
        find_member,
        find_proposal,
        kept_namespace,
        report,
        sync,
        this_machine,
    )
    from potluck.trust.membership_store import Circle

    before = Circle.of(sync(kept_namespace(namespace), host), this_machine())
    target = find_member(before.roster, node)
    keeps = [find_member(before.roster, name).node_id for name in keep_guest or []]
    proposal = find_proposal(before, target.node_id, keeps if keep_guest else None)
    if proposal is not None:
        after = agree(before, proposal, yes=yes)
        report(before, Circle.of(sync(after.namespace, host), before.me), json=json)
        return
    question = f'Take {target.name} ({target.node_id}) out of "{before.namespace.name}"?'
    confirm(question, yes=yes)
    after = before.propose(
        lambda roster, secret: roster.revoke(target.node_id, before.me, secret, keeps)
    )
    report(before, Circle.of(sync(after.namespace, host), before.me), json=json)


# --------------------------------------------------------------------------------------------------
# ``potluck rotate``: give a namespace a new secret.

ROTATE_EXAMPLES = """\
potluck rotate                    a new secret for the namespace this machine uses
potluck rotate --namespace lab    for another one
"""


def rotate(
    *, namespace: Namespace = None, host: Member = None, yes: Yes = False, json: Json = False
) -> None:
    """Propose a new secret for everybody, for instance after a backup was lost.

    Most of the members have to agree, each by this same command; until then it waits and the old
    secret is in force.
    """
    from potluck.apps.cli.membership import (
        agree,
        confirm,
        find_proposal,
        kept_namespace,
        report,
        sync,
        this_machine,
    )
    from potluck.trust.membership_store import Circle

    before = Circle.of(sync(kept_namespace(namespace), host), this_machine())
    proposal = find_proposal(before, None)
    if proposal is not None:
        after = agree(before, proposal, yes=yes)
        report(before, Circle.of(sync(after.namespace, host), before.me), json=json)
        return
    confirm(f'Give "{before.namespace.name}" a new secret?', yes=yes)
    after = before.propose(lambda roster, secret: roster.rotate(before.me, secret))
    report(before, Circle.of(sync(after.namespace, host), before.me), json=json)


# --------------------------------------------------------------------------------------------------
# ``potluck unpair``: this machine leaves a namespace.

UNPAIR_EXAMPLES = """\
potluck unpair        leaves the namespace this machine uses
potluck unpair lab    leaves the one named lab
"""


def unpair(
    name: Annotated[
        str | None, typer.Argument(metavar="NAMESPACE", show_default=False, help="Which one.")
    ] = None,
    *,
    namespace: Namespace = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Leave a namespace: forget its secret and its members on this machine.

    The others are not told.  They list this machine as a member until one of them revokes it.
    """
    from potluck.apps.cli.membership import confirm, print_json
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
            f"This machine is in no namespace {files.name!r}",
            got=files.name,
            hint=f"Those it is in: {names}.",
        )
    was_used = files.is_used
    confirm(f'Leave "{files.name}"? Coming back needs pairing again.', yes=yes)
    files.delete()
    if json:
        print_json({"left": files.name})
        return
    typer.echo(f'This machine has left "{files.name}": its secret and its roster are deleted here.')
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
        typer.Argument(metavar="NAMESPACE", help="What the group is called; the same everywhere."),
    ],
    *,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Read the passphrase from the first line of stdin.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Make this machine a member of the group of all who give this name and this passphrase.

    Do the same on every machine: the first one makes the group, the others are in it.  Without a
    passphrase, `potluck pair` joins two machines by a one-time code; only such a group can remove
    a machine.

    The passphrase is asked for, or read from stdin, or from POTLUCK_PASSPHRASE.  It is never an
    argument: those are visible to every user of the machine.  What is kept is a key made from it.
    """
    from potluck.apps.cli.common import working
    from potluck.apps.cli.membership import confirm, print_json
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
