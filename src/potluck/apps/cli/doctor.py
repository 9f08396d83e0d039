"""``potluck doctor``: why nodes do not meet, what shows it, and what to do."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.common import Json, Namespace, working

if TYPE_CHECKING:
    from potluck.doctor.facts import Finding, Scene


EXAMPLES = """\
potluck doctor                              looks around for three seconds; best on both machines
potluck doctor --peer 192.168.1.20         also tries a machine whose address is known
potluck doctor --json                       the same for a program
"""

EXIT_CODES = (
    "Exit codes: 0 nothing is wrong, 1 failed (the reason is on stderr), 2 wrong usage, "
    "3 there is a problem, 130 interrupted."
)

ILL = 3
"""The exit code when there is a problem; 1 means that the doctor itself failed."""

WIDE = 100
"""Columns where there is no terminal to fit into."""

ADVICE = "What to do:"

Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="ADDRESS[:PORT]",
        help="Where another node is, or should be; may be given several times.",
        envvar="POTLUCK_PEERS",
        show_default=False,
    ),
]

Seconds = Annotated[
    float, typer.Option("--seconds", min=0.5, max=60, help="For how long to listen.")
]


def doctor(
    *,
    peers: Peers = None,
    seconds: Seconds = 3.0,
    namespace: Namespace = None,
    json: Json = False,
) -> None:
    """Find out why nodes do not meet: names the cause, what shows it, and what to do.

    Looks at this machine (interfaces, keys, ports, its name, its battery), at what is announced on
    the network, and at whether those who belong to the same namespace can be reached, speak the
    same version, get large packets and have the same time. Run it on both machines at the same
    time: then the way between them is checked in both directions, and how much goes through.
    """
    from potluck.apps.cli.membership import known_name, print_json
    from potluck.apps.cli.status_facts import findings_of, look_at_jobs
    from potluck.doctor.checks import diagnose
    from potluck.doctor.facts import Severity
    from potluck.doctor.look import look_around

    known_name(namespace)
    texts = [text for each in peers or [] for text in each.replace(",", " ").split()]
    try:
        with working(f"Looking around for {seconds:g} s"):
            scene = look_around(namespace, texts, seconds=seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--peer") from None
    findings = diagnose(scene)
    story: list[list[str]] = []
    if scene.has_jobs:
        jobs, story = look_at_jobs(namespace, texts)
        findings = [*findings_of(jobs), *findings]
    is_healthy = all(finding.severity is not Severity.PROBLEM for finding in findings)
    if json:
        print_json(_facts(scene, findings, story, is_healthy=is_healthy))
    else:
        _print(scene, findings, story)
    if not is_healthy:
        raise typer.Exit(ILL)


def _facts(
    scene: Scene, findings: list[Finding], story: list[list[str]], *, is_healthy: bool
) -> dict[str, Any]:
    return {
        "healthy": is_healthy,
        "namespace": scene.namespace,
        "addresses": scene.hosts,
        "met": scene.met,
        "story": story,
        "findings": [
            {
                "check": finding.check,
                "severity": finding.severity.value,
                "cause": finding.cause,
                "evidence": list(finding.evidence),
                "fix": finding.fix,
            }
            for finding in findings
        ],
    }


def _print(scene: Scene, findings: list[Finding], story: list[list[str]]) -> None:
    from rich.console import Console
    from rich.text import Text

    from potluck.doctor.facts import Severity

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    for finding in findings:
        is_problem = finding.severity is Severity.PROBLEM
        label, style = ("Problem", "bold red") if is_problem else ("Note", "bold yellow")
        headline = Text.assemble((f"{label}: ", style), (f"{finding.cause}.", "bold"))
        console.print(headline, soft_wrap=not console.is_terminal)
        for sentence in finding.evidence:
            console.print(Text(_indented(sentence, console.width)))
        advice = Text(_indented(f"{ADVICE} {finding.fix}", console.width))
        advice.highlight_words([ADVICE], "green")
        console.print(advice, end="\n\n")
    for sentence in [sentence for paragraph in story for sentence in paragraph]:
        console.print(Text(sentence), soft_wrap=not console.is_terminal)
    problems = sum(finding.severity is Severity.PROBLEM for finding in findings)
    console.print(Text(_summary(scene, problems), "bold red" if problems else "bold green"))


def _indented(text: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ")


def _summary(scene: Scene, problems: int) -> str:
    if problems:
        return f"{problems} problem{'s' if problems > 1 else ''} found."
    met = ", ".join(map(scene.name_of, scene.met))
    where = ", ".join(scene.hosts)
    reached = f' Members of "{scene.namespace}" that were met: {met}.' if met else ""
    return f"Nothing is wrong with this machine ({where}).{reached}"
