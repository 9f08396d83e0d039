"""Observers: processes that look on and are never members, such as ``potluck status``.

An observer finds the processes of a namespace as members do, asks each how it is, and keeps the
answers.  A launcher is an observer that is found by others: launchers of one job ask each other.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

from potluck import _process, _time
from potluck._decode import decode_json
from potluck._process import Closing
from potluck._version import THIS_BUILD
from potluck.backend.port import NodePort
from potluck.cluster.connections import (
    REPORTS,
    ControlConnections,
    ControlHandshake,
    DialPool,
    make_card,
    open_port,
)
from potluck.cluster.io import CLOSED
from potluck.cluster.reports import (
    ContinueRequest,
    EpochLine,
    Journal,
    StatusReport,
    StatusRequest,
    bounded_facts,
    read_said,
    write,
)
from potluck.discovery.records import Advert, job_tag
from potluck.discovery.service import Discovery
from potluck.errors import BackendUnavailable, DistributedError, Timeout
from potluck.identity.namespace import NetworkNamespace, Protection
from potluck.logs import get_logger
from potluck.membership.messages import ProcessInfo, ProcessRole
from potluck.net.addresses import Address, usable_hosts

if TYPE_CHECKING:
    from potluck._types import ProcessId
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.connections import DialCandidate
    from potluck.cluster.io import ControlConnection


# --------------------------------------------------------------------------------------------------
# A history: what an observer that stays has learned, of those who are gone as well.
#
# Bounded in every direction, whatever the processes of a namespace tell and however often they come
# and go.  Any thread may use it.

KEPT_NEWS = 400
"""Events of all processes that are remembered."""

KEPT_EPOCHS = 64
"""Views of each job that are remembered."""

KEPT_JOBS = 32
"""Jobs whose views are remembered: those of which something was heard last."""

KEPT_GONE = 32
"""Processes that are gone and not forgotten."""

SAME_WITHIN = 5.0
"""Seconds within which the same sentence of another process is the same news."""

MAX_PROCESSES = 1024
"""Processes whose last number is remembered."""

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ObservedEvent:
    """An event that a process told."""

    number: int
    """Counts what this history has heard, from 1."""
    time: float
    """Seconds since 1970, by the clock of the machine that told it."""
    job: str
    who: Key
    name: str
    """Who told it."""
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class GoneProcess:
    """A process that was here."""

    report: StatusReport
    """The last that it said."""
    time: float
    cause: str
    """What was seen of its end from here."""

    @property
    def is_orderly(self) -> bool:
        """Whether it left by itself, as far as can be seen."""
        return self.cause == CLOSED


class ObservedHistory:
    """What has been heard; ``clock`` gives seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._journals: dict[Key, Journal] = {}
        self._after: dict[Key, int] = {}
        self._news: deque[ObservedEvent] = deque(maxlen=KEPT_NEWS)
        self._count = 0
        self._epochs: dict[str, dict[tuple[str, int], EpochLine]] = {}
        self._gone: dict[Key, GoneProcess] = {}
        self._since: dict[Key, float] = {}

    # -- the observer writes -------------------------------------------------------------------

    def after(self, key: Key) -> int:
        """The number of the last event of a process that is known."""
        with self._lock:
            return self._after.get(key, 0)

    def arrived(self, key: Key) -> None:
        """A process is here."""
        with self._lock:
            self._gone.pop(key, None)
            if key not in self._since:
                self._since[key] = self._clock()
                _shorten(self._since, MAX_PROCESSES)

    def parted(self, report: StatusReport, cause: str) -> None:
        """It is not any more."""
        with self._lock:
            self._journals.pop(report.key, None)
            self._gone[report.key] = GoneProcess(report, self._clock(), cause)
            _shorten(self._gone, KEPT_GONE)

    def heard(self, report: StatusReport, journal: Journal) -> None:
        """A process has told what happened."""
        with self._lock:
            self._journals[journal.key] = journal
            last = self._after.pop(journal.key, 0)
            for event in journal.events:
                if event.number > last:
                    last = event.number
                    self._add(report, event.time, event.level, event.text)
            self._after[journal.key] = last
            _shorten(self._after, MAX_PROCESSES)
            views = self._epochs.pop(report.job, {})
            for line in journal.epochs:
                known = views.get((line.lineage, line.epoch))
                if known is None or line.time < known.time:
                    views[line.lineage, line.epoch] = line
            in_order = sorted(views.items(), key=lambda each: each[1].time)
            if in_order:
                self._epochs[report.job] = dict(in_order[-KEPT_EPOCHS:])
                _shorten(self._epochs, KEPT_JOBS)

    def _add(self, report: StatusReport, moment: float, level: str, text: str) -> None:
        for known in reversed(self._news):
            is_same = known.text == text and known.job == report.job
            if is_same and abs(known.time - moment) < SAME_WITHIN:
                return  # every member tells of a new view; once is enough
        self._count += 1
        name = report.name or report.node[:8]
        self._news.append(
            ObservedEvent(self._count, moment, report.job, report.key, name, level, text),
        )

    # -- others read ---------------------------------------------------------------------------

    @property
    def last_number(self) -> int:
        """Of the latest news."""
        return self._count

    def news(self, after: int = 0) -> list[ObservedEvent]:
        """What was heard after that number, as far as it is remembered."""
        with self._lock:
            return [each for each in self._news if each.number > after]

    @property
    def journals(self) -> dict[Key, Journal]:
        """The latest journal of each process that is here."""
        with self._lock:
            return dict(self._journals)

    def epochs(self, job: str) -> list[EpochLine]:
        """The views of a job, oldest first."""
        with self._lock:
            return list(self._epochs.get(job, {}).values())

    @property
    def former(self) -> frozenset[str]:
        """Who was here: processes, and where they were."""
        gone = {f"{each.report.node}/{each.report.incarnation}" for each in self.gone}
        return frozenset(
            gone | {str(Address(each.report.host, each.report.port)) for each in self.gone}
        )

    @property
    def left_behind(self) -> frozenset[str]:
        """Processes, and machines, of views before the latest that the latest one left out."""
        found: set[str] = set()
        with self._lock:
            for views in self._epochs.values():
                *earlier, latest = views.values()
                members = {member for view in earlier for member in view.members}
                gone = members.difference(latest.members)
                here = {member.partition("/")[0] for member in latest.members}
                found |= gone | {member.partition("/")[0] for member in gone} - here
        return frozenset(found)

    def is_no_news(self, contact: DialCandidate) -> bool:
        """Whether it is known why a process cannot be reached.

        A later view left it out; or no process listens any more where it was.
        """
        who = contact.key if contact.process else contact.node
        places = {contact.key, *map(str, contact.addresses)}
        is_over = "refused" in contact.trouble and not places.isdisjoint(self.former)
        return who in self.left_behind or is_over

    def since(self, key: Key) -> float:
        """When a process was first seen, in seconds since 1970."""
        with self._lock:
            return self._since.get(key, 0.0)

    @property
    def gone(self) -> list[GoneProcess]:
        """Who was here and is not, the last to go last."""
        with self._lock:
            return list(self._gone.values())


def _shorten(book: dict[Any, Any], most: int) -> None:
    """Forget what was written first."""
    while len(book) > most:
        del book[next(iter(book))]


# --------------------------------------------------------------------------------------------------
# Silence: who has not answered an observer's questions for too long.
#
# A connection does not notice a cut cable: it stays open for minutes.

SILENT_AFTER = 12
"""Questions without an answer after which a process counts as silent.

Questions, not seconds: who slept himself has asked nothing meanwhile.
"""

KeyT = TypeVar("KeyT", bound=Hashable)


class UnansweredQueries(Generic[KeyT]):
    """Counts questions that were not answered.

    >>> silence = UnansweredQueries[str]()
    >>> [silence.asked(["attic"]) for _ in range(SILENT_AFTER)][-2:]
    [[], ['attic']]
    """

    def __init__(self) -> None:
        self._unanswered: dict[KeyT, int] = {}

    def asked(self, everybody: Collection[KeyT]) -> list[KeyT]:
        """All of these were asked once more; those who have fallen silent with this question."""
        before = self._unanswered
        self._unanswered = {each: before.get(each, 0) + 1 for each in everybody}
        return [each for each, count in self._unanswered.items() if count == SILENT_AFTER]

    def answered(self, who: KeyT) -> None:
        """A process has said something."""
        self._unanswered.pop(who, None)


# --------------------------------------------------------------------------------------------------

STARTING, STOPPING = "starting", "stopping"
"""The last word of a launcher: its script begins now, at the same address; or does not."""

ASK_EVERY = 0.25
"""Seconds between two questions."""

LOOK_EVERY = 1.0
"""Seconds between two looks at whether this machine has another secret now."""


class Observer(Closing):
    """Looks on; a context manager.

    With a ``job`` it looks at that job, otherwise at all of the namespace.  With ``facts`` it is a
    launcher: it can be found, and answers with them.  With ``journals`` it asks everybody for what
    happens as well, and keeps that in its :attr:`history`.
    """

    def __init__(
        self,
        config: AutoDiscoveryConfig,
        *,
        job: str | None = None,
        facts: Mapping[str, str] | None = None,
        journals: bool = False,
    ) -> None:
        self.job = job
        self.history = ObservedHistory()
        self._wants_journals = journals
        self._is_launcher = facts is not None
        self._facts = dict(facts or {})
        self._reports: dict[tuple[str, int], StatusReport] = {}
        self._parted: dict[tuple[str, int], StatusReport] = {}
        self._silence: UnansweredQueries[ControlConnection] = UnansweredQueries()
        self._lock = threading.Lock()
        self._arrival = threading.Condition(self._lock)
        self._count = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = False
        self._state = "waiting"
        # Who only looks on is not looked for: the usual ports are left to those who are.
        at = config.port or 0
        self.port = (
            open_port(config)
            if self._is_launcher
            else NodePort(config.namespace, port=at, host=config.host)
        )
        self.card = make_card(self.port, config, ProcessRole.OBSERVER)
        self._pool = DialPool()
        self._links = ControlConnections(self.card, self, self._pool, self._inbox.put)
        links = self._links
        links.handshake = ControlHandshake(self.port, job, self.card, links.opened, links.objection)
        self._advert = self._make_advert()
        self._looking = looking = config.discovery(announce=self._is_launcher)
        self._thread = threading.Thread(target=self._run, name="potluck-observer", daemon=True)
        self._thread.start()
        self._discovery = links.discovery = Discovery(self._advert, looking, links.wake)
        links.wake()

    @property
    def namespace(self) -> NetworkNamespace:
        """As it is now: another secret may have come since this process began."""
        return self.port.members.security.namespace

    def _make_advert(self) -> Advert:
        namespace, job = self.namespace, self.job
        advert = Advert.of(namespace, self.card.process, job=job or "", port=self.port.port)
        return replace(advert, job_tag="" if job is None else job_tag(namespace, job))

    # -- any thread ----------------------------------------------------------------------------

    @property
    def reports(self) -> list[StatusReport]:
        """What is known now: one report for each process that is connected, by name and start."""
        with self._lock:
            found = list(self._reports.values())
        return sorted(found, key=lambda each: (each.job, each.name, each.node, each.incarnation))

    @property
    def parted(self) -> list[StatusReport]:
        """Launchers that have handed over to their scripts, or have given up."""
        with self._lock:
            return list(self._parted.values())

    @property
    def troubles(self) -> dict[str, str]:
        """Who was seen and could not be reached, and why, unless that is known."""
        return self._links.contacts.troubles_except(
            lambda contact: contact.is_of_another_version or self.history.is_no_news(contact)
        )

    @property
    def differing(self) -> dict[str, str]:
        """Machines of versions with which no work is possible: which, and what to do, by id."""
        return {who: str(error) for who, error in self.port.members.differing.items()}

    @property
    def foreigners(self) -> list[str]:
        """Who was heard and is of another namespace, as sentences."""
        return sorted({f"{each.is_elsewhere}." for each in self._discovery.foreigners})

    @property
    def strangers(self) -> dict[str, str]:
        """Machines that were heard and are of another namespace: ids, and how to recognise them."""
        return {each.node: each.who for each in self._discovery.foreigners}

    @property
    def has_network(self) -> bool:
        """Whether this machine is connected to a network that is used."""
        looking = self._looking
        return bool(usable_hosts(virtual=looking.virtual, only=looking.interfaces))

    @property
    def discovery_status(self) -> dict[str, str]:
        """In words, for each way of finding others: what it does, or why it cannot."""
        return self._discovery.status()

    def own_report(self) -> StatusReport:
        """What this process tells those who ask."""
        return StatusReport(
            node=self.card.node,
            incarnation=self.card.incarnation,
            name=self.card.name,
            host=self.card.hosts[0] if self.card.hosts else "",
            port=self.card.port,
            pid=os.getpid(),
            version=THIS_BUILD.potluck,
            protocol=THIS_BUILD.protocol,
            oldest=THIS_BUILD.oldest,
            role="launcher" if self._is_launcher else "observer",
            job=self.job or "",
            state=self._state,
            facts=bounded_facts(self._facts),
        )

    def tell(self, state: str, **facts: str) -> None:
        """Be in another state from now on, with other facts, and tell everybody at once."""
        if state != self._state or facts.items() - self._facts.items():
            self._state, self._facts = state, {**self._facts, **facts}
            self._inbox.put(self._tell_all)

    def ask_to_continue(self, job: str) -> None:
        """Have every process of a job that waits for missing machines continue without them."""
        self._inbox.put(lambda: self._send_all(ContinueRequest(job)))

    @property
    def addresses(self) -> list[str]:
        """Where the processes of this job that are connected can be reached."""
        found = {each.key for each in self.reports if each.job == self.job}
        connections = list(self._links.observers.values())
        return [
            str(each.address)
            for each in connections
            if each.card.port and (each.card.node, each.card.incarnation) in found
        ]

    @property
    def hosts(self) -> dict[tuple[str, int], str]:
        """By which address each process is connected with us, if it means the same elsewhere."""
        connections = list(self._links.observers.values())
        return {
            (each.card.node, each.card.incarnation): each.address.host
            for each in connections
            if "%" not in each.address.host
        }

    @property
    def news(self) -> int:
        """How many reports and departures there were so far."""
        return self._count

    def wait_for_news(self, since: int, timeout: float) -> int:
        """Wait at most ``timeout`` seconds until :attr:`news` is not ``since``; its value then."""
        with self._arrival:
            self._arrival.wait_for(lambda: self._count != since, max(0.0, timeout))
            return self._count

    def wait_until(
        self, condition: Callable[[list[StatusReport]], bool], timeout: float
    ) -> list[StatusReport]:
        """The reports once they fulfil something; raises ``Timeout``."""
        deadline, news = time.monotonic() + timeout, self.news
        while not condition(reports := self.reports):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise Timeout(
                    f"The group did not reach the expected state in {timeout:g} s", seconds=timeout
                )
            news = self.wait_for_news(news, remaining)
        return reports

    def close(self) -> None:
        """Leave; members do not notice."""
        if self._ended:
            return
        self._inbox.put(self._stop)
        self._thread.join(2.0)
        self._pool.close(0.0)
        self._links.io.close(0.5)
        self._discovery.close()
        self.port.close()
        self._pool.close(2.0)
        with contextlib.suppress(queue.Empty):
            while True:  # connections that were opened too late
                self._inbox.get_nowait()()

    def _stop(self) -> None:
        self._ended = self._links.is_over = True

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        ask_at = look_at = 0.0
        while not self._ended:
            now = _time.now()
            if now >= look_at:
                look_at = now + LOOK_EVERY
                self._look_at_secret()
            if now >= ask_at:
                ask_at = now + ASK_EVERY
                self._ask_all()
            due = self._links.contacts.next_deadline
            until = ask_at if due is None else min(ask_at, due)
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=max(0.001, until - now))()
            if not self._ended:
                self._links.dial_due(_time.now())

    def _look_at_secret(self) -> None:
        """This machine may have been paired meanwhile, or the secret has changed: show the new one.

        Those who look for it find us then, and we find them.
        """
        with contextlib.suppress(DistributedError, OSError):  # the files are damaged: as it was
            self.port.members.check()
        advert = self._make_advert()
        if advert != self._advert and self._links.discovery is not None:
            self._advert = advert
            self._links.discovery.update(advert)

    def _tell_all(self) -> None:
        self._send_all(self.own_report())

    def _send_all(self, message: StatusReport | ContinueRequest) -> None:
        for connection in list(self._links.observers):
            self._links.io.send(connection, write(message), REPORTS)

    def _ask_all(self) -> None:
        connections = self._links.observers
        for connection in connections:
            self._ask(connection)
        for connection in self._silence.asked(connections):
            self._disbelieve(connections[connection].card.process)

    def _disbelieve(self, process: ProcessId) -> None:
        """What a silent member said last counts no more; a launcher is dialled anew.

        After an outage the system may take as long as that lasted to use its connection again.
        """
        with self._lock:
            report = self._reports.get((process.node, process.incarnation))
        if report is not None and report.role == "member":
            self.lost(process, f"it has not answered for {SILENT_AFTER * ASK_EVERY:g} s")
        else:
            self._links.contacts.disconnected(process, _time.now())

    def _ask(self, connection: ControlConnection) -> None:
        card = self._links.observer_behind(connection) if self._wants_journals else None
        after = -1 if card is None else self.history.after((card.node, card.incarnation))
        with contextlib.suppress(DistributedError):
            self._links.io.send(connection, write(StatusRequest(news_after=after)), REPORTS)

    # -- what the links tell -------------------------------------------------------------------

    def met(self, card: ProcessInfo) -> None:
        """There is a connection to a process: ask at once."""
        for connection, opened in self._links.observers.items():
            if opened.card.process == card.process:
                self._ask(connection)

    def misbehaved(self, process: ProcessId, why: str) -> None:
        """An observer has no process to remove: it only closes the connection."""

    def lost(self, process: ProcessId, cause: str) -> None:
        """There is none any more."""
        with self._lock:
            report = self._reports.pop((process.node, process.incarnation), None)
            self._count += 1
            self._arrival.notify_all()
            if report is not None and report.state in {STARTING, STOPPING}:
                self._parted[report.key] = report
        if report is not None:
            self.history.parted(report, cause)

    def probed(self, process: ProcessId, what: str, *, has_ended: bool) -> None:
        """Never asked for."""

    def said(self, process: ProcessId, payload: bytes) -> None:
        """Not for observers."""

    def asked(self, connection: ControlConnection, payload: bytes) -> None:
        """A process asks, or has answered."""
        said = read_said(payload)
        self._silence.answered(connection)
        if isinstance(said, StatusRequest):
            self._links.io.send(connection, write(self.own_report()), REPORTS)
            return
        card = self._links.observer_behind(connection)
        if isinstance(said, ContinueRequest) or card is None or card.process != said.key:
            return
        if isinstance(said, StatusReport):
            self.history.arrived(said.key)
            with self._lock:
                self._reports[said.key] = said
                self._count += 1
                self._arrival.notify_all()
            return
        with self._lock:
            report = self._reports.get(said.key)
        if report is not None and self._wants_journals:
            self.history.heard(report, said)


# --------------------------------------------------------------------------------------------------
# A window on a run: the dashboard, in a process of its own beside this one.
#
# A web server in the process that trains would take turns with it at the interpreter.  So the
# dashboard looks on from outside, like any observer; it is told on its standard input what to look
# at, and ends when that does, whatever becomes of this process.

logger = get_logger("potluck.dashboard")

Wanted: TypeAlias = bool | int | str
"""Whether and where: True for this machine alone, or a port, or ``host`` or ``host:port``."""

OPEN_WITHIN = 20.0
"""Seconds for the dashboard to start."""

CLOSE_WITHIN = 3.0

WEB_SERVER = ("starlette", "uvicorn")
MODULE = "potluck.apps.dashboard.server"  # above this layer: started, never imported

Text = Annotated[str, msgspec.Meta(max_length=1024)]


class DashboardRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the dashboard's process is to look at, and where to show it."""

    job: Text
    namespace: Text
    secret: Text = ""
    """Of a namespace that this machine does not keep, in base64; it goes through a pipe."""
    protection: Text = Protection.SECRET.value
    peers: Annotated[list[Text], msgspec.Meta(max_length=256)] = []
    interfaces: Annotated[list[Text], msgspec.Meta(max_length=64)] = []
    virtual: bool = False
    multicast: bool = True
    known: bool = True
    host: Text = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] | None = None

    def resolve(self) -> NetworkNamespace | str:
        """The namespace that is meant."""
        if not self.secret:
            return self.namespace
        secret = base64.b64decode(self.secret)
        return NetworkNamespace(self.namespace, secret, protection=Protection(self.protection))


class DashboardReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer: where it is, or why it is not."""

    url: Text = ""
    trouble: Text = ""


def find_web_server() -> None:
    """Raise ``BackendUnavailable`` where the dashboard's web server is not installed."""
    missing = [name for name in WEB_SERVER if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            "The dashboard needs a web server that is not installed here",
            cause=f"there is no {' and no '.join(missing)}",
            hint="Install it with: pip install 'potluck[dashboard]', or beside a wheel that is "
            "installed already: pip install starlette uvicorn",
        )


def place_of(wanted: Wanted) -> tuple[str, int | None]:
    """Address and port that a user wants.

    >>> place_of(True), place_of(9000), place_of("0.0.0.0"), place_of("[::1]:80")
    (('127.0.0.1', None), ('127.0.0.1', 9000), ('0.0.0.0', None), ('::1', 80))
    """
    if isinstance(wanted, bool):
        return "127.0.0.1", None
    if isinstance(wanted, int):
        return "127.0.0.1", wanted
    host, _, port = wanted.rpartition(":") if _has_port(wanted) else (wanted, "", "")
    return host.strip("[]"), int(port) if port else None


def _has_port(text: str) -> bool:
    end = text.rpartition(":")[2]
    is_number = end.isascii() and end.isdecimal()
    return is_number and (text.count(":") == 1 or "]:" in text)


def request_for(
    wanted: Wanted, config: AutoDiscoveryConfig, namespace: NetworkNamespace, port: int
) -> DashboardRequest:
    """What to tell the dashboard of a node that listens at ``port``."""
    host, wanted_port = place_of(wanted)
    is_strange = namespace.protection.has_own_secret and not namespace.is_kept
    return DashboardRequest(
        job=config.job_name,
        namespace=namespace.name,
        secret=base64.b64encode(namespace.secret).decode() if is_strange else "",
        protection=namespace.protection.value,
        peers=[f"127.0.0.1:{port}", *config.peers][:256],
        interfaces=list(config.interfaces),
        virtual=config.virtual,
        multicast=config.multicast,
        known=config.known,
        host=host,
        port=wanted_port,
    )


class DashboardProcess:
    """The dashboard's process; ends with :meth:`close`, or with us."""

    def __init__(self, request: DashboardRequest) -> None:
        find_web_server()
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, which then closes this
        )
        assert self._process.stdin is not None
        _process.track(self._process.stdin)  # a forked child must not keep it open
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name="potluck-window", daemon=True)
        self._thread.start()
        with contextlib.suppress(OSError):
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        self._answers.put(self._process.stdout.readline(1 << 16))

    def wait(self, within: float = OPEN_WITHIN) -> str:
        """The address of the dashboard once it is there."""
        try:
            outlook = decode_json(self._answers.get(timeout=within), DashboardReply)
        except (queue.Empty, msgspec.DecodeError):
            outlook = DashboardReply(trouble="its process did not start")
        if outlook.trouble:
            raise BackendUnavailable("The dashboard cannot be shown", cause=outlook.trouble)
        logger.info("The dashboard is at %s", outlook.url.partition("?")[0])
        return outlook.url

    def close(self) -> None:
        """Close it.  May be called twice."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(CLOSE_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._thread.join(CLOSE_WITHIN)
        process.stdout.close()
