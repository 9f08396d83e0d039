"""``potluck rotate``: give a namespace a new secret."""

from __future__ import annotations

from potluck.apps.cli.options import Json, Namespace, Yes

__all__ = ["EXAMPLES", "rotate"]

EXAMPLES = """\
potluck rotate                    a new secret for the namespace this machine uses
potluck rotate --namespace lab    for another one
"""


def rotate(*, namespace: Namespace = None, yes: Yes = False, json: Json = False) -> None:
    """Propose a new secret for everybody, for instance after a backup was lost.

    Most of the members have to sign; until then it waits and the old secret is in force.
    """
    from potluck.apps.cli.change import report
    from potluck.apps.cli.circle import confirm, kept_namespace, this_machine
    from potluck.runtime.circles import Circle

    before = Circle.of(kept_namespace(namespace), this_machine())
    confirm(f'Give "{before.namespace.name}" a new secret?', yes=yes)
    after = before.propose(lambda roster, secret: roster.rotate(before.me, secret))
    report(before, after, json=json)
