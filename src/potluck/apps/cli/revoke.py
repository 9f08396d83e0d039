"""``potluck revoke``: take a machine out of a namespace."""

from __future__ import annotations

from typing import Annotated

import typer

from potluck.apps.cli.options import Json, Member, Namespace, Yes

__all__ = ["EXAMPLES", "revoke"]

EXAMPLES = """\
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
    from potluck.apps.cli.change import agree, find_member, find_proposal, report
    from potluck.apps.cli.circle import confirm, kept_namespace, sync, this_machine
    from potluck.backend.circles import Circle

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
