"""``potluck doctor``: why nodes do not meet, what shows it, and what to do."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.common import Json, Namespace
from potluck.apps.cli.output import console, print_json, print_line, working

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from potluck.apps.cli.status_facts import JobStatus
    from potluck.cluster.reports import StatusReport
    from potluck.doctor.facts import DoctorFacts, Finding


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
    """Find out why machines do not meet: names the cause, what shows it, and what to do.

    Looks at this machine (interfaces, keys, ports, its name, its battery), at what is announced on
    the network, and at whether the other machines of the group can be reached, have the same
    version, get large packets and have the same time. Run it on both machines at the same time:
    then the connection between them is checked in both directions, and its speed is measured.
    """
    from potluck.apps.cli.membership import known_name
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
    scene: DoctorFacts, findings: list[Finding], story: list[list[str]], *, is_healthy: bool
) -> dict[str, Any]:
    return {
        "healthy": is_healthy,
        "namespace": scene.namespace,
        "addresses": scene.hosts,
        "met": scene.met,
        "rates": [
            {
                "to": target.node,
                "name": target.name,
                "up": target.rate.bytes_per_second,
                "down": target.rate.down or None,
                "rate_age": target.rate.age,
                "rate_source": target.rate.source,
            }
            for target in scene.targets
            if target.rate is not None
        ],
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


def _print(scene: DoctorFacts, findings: list[Finding], story: list[list[str]]) -> None:
    from rich.text import Text

    from potluck.doctor.facts import Severity

    to = console(wide=WIDE)
    for finding in findings:
        is_problem = finding.severity is Severity.PROBLEM
        label, style = ("Problem", "bold red") if is_problem else ("Note", "bold yellow")
        headline = Text.assemble((f"{label}: ", style), (f"{finding.cause}.", "bold"))
        print_line(to, headline)
        for sentence in finding.evidence:
            to.print(Text(_indented(sentence, to.width)))
        advice = Text(_indented(f"{ADVICE} {finding.fix}", to.width))
        advice.highlight_words([ADVICE], "green")
        to.print(advice, end="\n\n")
    for sentence in [sentence for paragraph in story for sentence in paragraph]:
        print_line(to, sentence)
    problems = sum(finding.severity is Severity.PROBLEM for finding in findings)
    to.print(Text(_summary(scene, problems), "bold red" if problems else "bold green"))


def _indented(text: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ")


def _summary(scene: DoctorFacts, problems: int) -> str:
    if problems:
        return f"{problems} problem{'s' if problems > 1 else ''} found."
    met = ", ".join(map(scene.name_of, scene.met))
    where = ", ".join(scene.hosts)
    reached = f' Members of "{scene.namespace}" that were met: {met}.' if met else ""
    return f"Nothing is wrong with this machine ({where}).{reached}"


# --------------------------------------------------------------------------------------------------
# What ``potluck doctor`` says of jobs that run: the sentences of ``potluck status``.

LOOKING = 2.0
"""Seconds after which those who have not answered are silent."""


def look_at_jobs(
    namespace: str | None, peers: Sequence[str]
) -> tuple[list[JobStatus], list[list[str]]]:
    """The jobs of a group, and everything in sentences; none if no job runs."""
    from potluck.apps.cli.status_facts import jobs_of, story_of, waiting_of
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.observer import Observer
    from potluck.errors import Timeout

    config = AutoDiscoveryConfig(job="doctor", namespace=namespace, peers=tuple(peers))
    # With journals it knows, as the others who look on, who is gone and so refuses.
    with Observer(config, journals=True) as observer:
        try:
            reports = observer.wait_until(
                lambda reports: _is_complete(reports, observer.history.journals), LOOKING
            )
        except Timeout:
            reports = observer.reports
        found, waiting = jobs_of(reports), waiting_of(reports)
        if not found and not waiting:
            return [], []
        story = story_of(
            observer.namespace.name,
            None,
            found,
            waiting,
            observer.troubles,
            differing=observer.differing.values(),
        )
    return found, story


def _is_complete(reports: list[StatusReport], journals: Collection[tuple[str, int]]) -> bool:
    from potluck.apps.cli.status_facts import is_whole

    members = {each.key for each in reports if each.role == "member"}
    return bool(reports) and is_whole(reports) and members.issubset(journals)


def findings_of(jobs: Iterable[JobStatus]) -> list[Finding]:
    """Jobs that stand still, and members of whom the others say that they are not well."""
    from potluck.doctor.facts import Finding, Severity

    return [
        Finding(
            check="jobs",
            cause=job.sentence,
            evidence=tuple(job.remarks) or (job.authority.reason,),
            fix="It continues by itself when the missing machines are back or known to be gone. "
            "Check that they are on and reachable. `potluck status --watch` shows it.",
            severity=Severity.PROBLEM if job.authority.state != "active" else Severity.NOTE,
        )
        for job in jobs
        if job.authority.state != "active" or any(_is_ill(job))
    ]


def _is_ill(job: JobStatus) -> Iterable[bool]:
    return (node.report is None or node.health in {"suspect", "dead"} for node in job.nodes)
