"""``potluck rotate``: give a namespace a new secret."""

from __future__ import annotations

from potluck.apps.cli.options import Json, Member, Namespace, Yes

__all__ = ["EXAMPLES", "rotate"]

EXAMPLES = """\
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
    from potluck.apps.cli.change import agree, find_proposal, report
    from potluck.apps.cli.circle import confirm, kept_namespace, sync, this_machine
    from potluck.backend.circles import Circle

    before = Circle.of(sync(kept_namespace(namespace), host), this_machine())
    proposal = find_proposal(before, None)
    if proposal is not None:
        after = agree(before, proposal, yes=yes)
        report(before, Circle.of(sync(after.namespace, host), before.me), json=json)
        return
    confirm(f'Give "{before.namespace.name}" a new secret?', yes=yes)
    after = before.propose(lambda roster, secret: roster.rotate(before.me, secret))
    report(before, Circle.of(sync(after.namespace, host), before.me), json=json)
