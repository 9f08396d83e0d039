"""Multicast DNS, the local network's own directory: opening it, and what all users of it share.

zeroconf does the talking.  It brings its own threads and event loop, which begin with
:func:`open_zeroconf` and end with its ``close``.  It takes a quarter of a second to import, so that
happens when it is first used.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from potluck._process import track
from potluck._types import NodeId
from potluck._version import Build
from potluck.discovery.records import Advert, DiscoveryConfig, Sighting
from potluck.errors import DistributedError
from potluck.identity.node import short_name
from potluck.logs import get_logger
from potluck.net.addresses import MAX_PORT, Address, by_preference, is_loopback, usable_hosts

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf


LOOPBACK = "127.0.0.1"
"""What a machine without a network talks to itself on."""

_sockets: weakref.WeakKeyDictionary[Zeroconf, _Sockets] = weakref.WeakKeyDictionary()


class DiscoveryUnavailable(DistributedError, OSError):
    """Machines cannot find each other here; an address has to be given."""


def open_zeroconf(hosts: Sequence[str], *, hint: str, both: bool = False) -> Zeroconf:
    """Zeroconf on the interfaces with these addresses.

    By IPv4 where there is any, which carries IPv6 addresses just as well; with ``both``, by IPv6 in
    addition where that can be done.  Raises :class:`DiscoveryUnavailable` with this hint.
    """
    from zeroconf import Error, Zeroconf

    ipv4 = [host for host in hosts if ":" not in host]
    choices: list[list[str | int]] = [list(ipv4 or hosts)]
    indexes = _indexes([host for host in hosts if ":" in host]) if both else []
    if indexes:
        choices.insert(0, [*ipv4, *indexes])
    failure: Exception | None = None
    for choice in choices:
        try:
            opened = Zeroconf(interfaces=choice)
        except (Error, OSError, RuntimeError) as error:
            failure = error
            continue
        if opened.engine.senders:
            _sockets[opened] = sockets = _Sockets(opened)
            track(sockets)
            return opened
        opened.close()
    raise unavailable(failure, hint)


def unavailable(error: Exception | None, hint: str) -> DiscoveryUnavailable:
    """The error that says so, and what to do instead."""
    return DiscoveryUnavailable(
        "Machines cannot find each other on this network",
        cause=(str(error) or None) if error else "no interface of this machine can multicast",
        hint=hint,
    )


def scoped(host: str) -> str:
    """An address with the interface's name where zeroconf has its number."""
    address, _, scope = host.partition("%")
    if scope.isdecimal() and ipaddress.ip_address(address).is_link_local:
        with contextlib.suppress(OSError):
            return f"{address}%{socket.if_indextoname(int(scope))}"
    return address


def unscoped(host: str) -> str:
    """An address as it is told to others, to whom our interfaces mean nothing."""
    return host.partition("%")[0]


def _indexes(hosts: Sequence[str]) -> list[str | int]:
    """The numbers of the interfaces with these IPv6 addresses."""
    import psutil

    wanted = {unscoped(host) for host in hosts}
    found: list[str | int] = []
    for name, entries in psutil.net_if_addrs().items():
        if any(unscoped(entry.address) in wanted for entry in entries):
            with contextlib.suppress(OSError):
                found.append(socket.if_nametoindex(name))
    return found


class _Sockets:
    """The sockets of a zeroconf, for a forked child to let go of."""

    def __init__(self, opened: Zeroconf) -> None:
        self._opened = weakref.ref(opened)

    def close(self) -> None:
        """Runs in the child, where zeroconf's thread does not exist: nothing else uses them."""
        opened = self._opened()
        if opened is None:
            return
        engine = opened.engine
        # Of the sockets themselves: a zeroconf that was closed has their old numbers still, and by
        # now these may be anybody's.  What is open gets its number taken by nothing at all, since
        # the objects that hold it would otherwise close it again, whoever has it then.
        numbers = {each.sock.fileno() for each in (*engine.readers, *engine.senders)} - {-1}
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in numbers:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)


# --------------------------------------------------------------------------------------------------
# How an advert is written into a record of multicast DNS, and read from one with every suspicion.
#
# The name of the record is ``TAG-JOB-TOKEN``, so that strangers can be told by it.  Its text says,
# in short fields, what :class:`~potluck.discovery.records.Advert` holds; the tags of earlier
# secrets are cut short, since they only have to be recognised.  Everybody on the network may write
# such records.  What does not look exactly like one of ours is no record.

SERVICE = "_potluck._tcp.local."

MAX_TEXT = 512
"""Bytes of a text that is read at all; ours have about 150, and 270 after many rotations."""

MAX_HOSTS = 8
"""Addresses of one record that are looked at: more would let it point us at a whole network."""

MAX_VERSION = 32
"""Characters of the version of Potluck."""

OLD_TAG = 12
"""Letters shown of an earlier tag: 60 bits, enough to recognise it."""

IPV6 = 6

Known = TypeVar("Known")

_LABEL = re.compile(r"[a-z2-7]{26}-[a-z2-7]{16}-[0-9a-f]{12}")
_FORMS: dict[bytes, re.Pattern[bytes]] = {
    b"v": re.compile(rb"[0-9]{1,6}"),
    b"t": re.compile(rb"[a-z2-7]{26}"),
    b"n": re.compile(rb"[0-9a-z]{32}"),
    b"i": re.compile(rb"[0-9]{1,18}"),
    b"j": re.compile(rb"[a-z2-7]{16}"),
    b"p": re.compile(rb"[0-9]{1,5}"),
}
_LATER: dict[bytes, re.Pattern[bytes]] = {
    b"l": re.compile(rb"[0-9]{1,6}"),
    b"s": re.compile(rb"[0-9][0-9a-z.+]{0,31}"),
}
_OLD = re.compile(rb"[a-z2-7]{12}(,[a-z2-7]{12}){0,7}")


@dataclass(frozen=True, slots=True)
class MdnsRecord:
    """What a record says, of whatever namespace and job."""

    tag: str
    job_tag: str
    node: NodeId
    incarnation: int
    version: int
    addresses: tuple[Address, ...]
    old_tags: tuple[str, ...] = ()
    oldest: int = 0
    potluck: str = ""

    @property
    def build(self) -> Build:
        """What it runs."""
        found = Build.announced(self.potluck, max(1, self.version), self.oldest)
        assert found is not None
        return found

    @property
    def who(self) -> str:
        """The machine as a person recognises it."""
        return f"{short_name(self.node)} at {self.addresses[0]}"

    @property
    def is_elsewhere(self) -> str:
        """What is said of it wherever it is seen from another namespace."""
        return f"{self.who} belongs to another group"

    def sighting(self, advert: Advert) -> Sighting | None:
        """What it means for us: None if it is about another namespace, another job or ourselves."""
        if (self.node, self.incarnation) == advert.process:
            return None
        if self.tag == advert.tag:
            if advert.job_tag not in {"", self.job_tag}:
                return None
            job = self.job_tag
        elif self.tag in advert.old_tags or advert.tag[:OLD_TAG] in self.old_tags:
            job = ""  # tags of jobs follow the secret, which one of us has missed a change of
        else:
            return None
        return Sighting(
            key=f"{self.node}/{self.incarnation}",
            sources=("mdns",),
            node=self.node,
            incarnation=self.incarnation,
            job_tag=job,
            addresses=self.addresses,
            version=self.version,
            oldest=self.oldest,
            potluck=self.potluck,
        )


def label_of(advert: Advert) -> str:
    """The name of its record: different for each process, and in all parts for each job.

    The last part also names its addresses.  Were that the same for two jobs, taking back the record
    of the one would take back the addresses of the other.
    """
    about = f"{advert.node}/{advert.incarnation}/{advert.tag}/{advert.job_tag}"
    token = hashlib.sha256(about.encode()).hexdigest()[:12]
    return f"{advert.tag}-{advert.job_tag}-{token}"


def is_label(label: str) -> bool:
    """Whether a record of this name can be one of ours."""
    return _LABEL.fullmatch(label) is not None


def properties_of(advert: Advert) -> dict[str, str]:
    """The text of its record."""
    fields = {
        "v": str(advert.version),
        "l": str(advert.oldest),
        "s": advert.potluck[:MAX_VERSION],
        "t": advert.tag,
        "n": str(advert.node),
        "i": str(advert.incarnation),
        "j": advert.job_tag,
        "p": str(advert.port),
    }
    if advert.old_tags:
        fields["o"] = ",".join(tag[:OLD_TAG] for tag in advert.old_tags[:8])
    return fields


def read_record(
    properties: Mapping[bytes, bytes | None], hosts: Sequence[str], *, loopback: bool
) -> MdnsRecord | None:
    """What a record says; None if it is not exactly of our form, or leads nowhere.

    ``loopback`` says whether addresses that lead back to this machine are meant that way.
    """
    values = {name: properties.get(name) or b"" for name in _FORMS}
    if not all(form.fullmatch(values[name]) for name, form in _FORMS.items()):
        return None
    port, incarnation = int(values[b"p"]), int(values[b"i"])
    usable = [host for host in by_preference(hosts) if _leads_somewhere(host, loopback=loopback)]
    if not 0 < port <= MAX_PORT or not incarnation or not usable:
        return None
    old = properties.get(b"o") or b""
    return MdnsRecord(
        tag=values[b"t"].decode(),
        job_tag=values[b"j"].decode(),
        node=NodeId(values[b"n"].decode()),
        incarnation=incarnation,
        version=int(values[b"v"]),
        addresses=tuple(Address(host, port) for host in usable[:MAX_HOSTS]),
        old_tags=tuple(old.decode().split(",")) if _OLD.fullmatch(old) else (),
        oldest=_optional(properties, b"l", int, 0),
        potluck=_optional(properties, b"s", bytes.decode, ""),
    )


def _optional(
    properties: Mapping[bytes, bytes | None],
    name: bytes,
    read: Callable[[bytes], Known],
    missing: Known,
) -> Known:
    """A field that not every version writes."""
    value = properties.get(name) or b""
    return read(value) if _LATER[name].fullmatch(value) else missing


def _leads_somewhere(host: str, *, loopback: bool) -> bool:
    """Not back to ourselves; and a link-local address is only good with its interface."""
    if is_loopback(host):
        return loopback
    address = ipaddress.ip_address(host.partition("%")[0])
    is_bare = address.version == IPV6 and address.is_link_local and "%" not in host
    return not (is_bare or address.is_unspecified or address.is_multicast)


# --------------------------------------------------------------------------------------------------
# Listening to the records of others: which names there are, what they say, and when they end.
#
# Runs on zeroconf's threads and never waits: a record that is not complete yet is asked for, and
# looked at again when the answer comes.  A record counts until its owner takes it back, or no
# longer answers when asked.  The number of names that are kept, and of those asked for, is bounded.

MAX_NAMES = 256
"""Records of interest that are kept; a flood of them pushes out the oldest, and costs no more."""

MAX_ASKED = 64
"""Incomplete records that are asked for at a time."""

# Numbers of the protocol (RFC 1035): a question; kinds of records; the only class in use.
_QUERY = 0
_A, _PTR, _TXT, _AAAA, _SRV = 1, 12, 16, 28, 33
_INTERNET = 1

MAX_RAW_HOSTS = 32  # addresses of one record that are looked at before the best are chosen


class MdnsListener:
    """The records of one service type, as one zeroconf hears them.

    ``on_heard`` gets a record's name and what it says, and tells whether that is of interest: only
    then is ``on_gone`` called when it ends, with the reason.
    """

    def __init__(
        self,
        service: str,
        on_heard: Callable[[str, MdnsRecord], bool],
        on_gone: Callable[[str, str], None],
    ) -> None:
        self._service = service
        self._on_heard = on_heard
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._zeroconf: Zeroconf | None = None
        self._loopback = False
        self._browser: Any = None
        self._names: dict[str, MdnsRecord] = {}
        self._silent: set[str] = set()
        self._asked: dict[str, None] = {}

    def start(self, zeroconf: Zeroconf, *, loopback: bool) -> None:
        """Listen with this; names heard before, with another one, still count until checked."""
        from zeroconf import DNSQuestionType, ServiceBrowser

        with self._lock:
            self._zeroconf, self._loopback = zeroconf, loopback
        # Answers by multicast: of several processes on a machine that share the port, only one
        # would get an answer addressed to it.
        self._browser = ServiceBrowser(
            zeroconf, self._service, [self._changed], question_type=DNSQuestionType.QM
        )

    def stop(self) -> None:
        """Listen no more; ends zeroconf's browsing thread."""
        if self._browser is not None:
            self._browser.cancel()
            self._browser = None
        with self._lock:
            self._zeroconf = None
            self._asked.clear()

    def ask(self) -> None:
        """Ask once more who is there: two who began while the network was cut have not met.

        Those who are known already are named in the question, and need not answer.
        """
        with self._lock:
            zeroconf = self._zeroconf
        if zeroconf is not None and zeroconf.loop is not None:
            with contextlib.suppress(RuntimeError):  # its loop may have ended this instant
                zeroconf.loop.call_soon_threadsafe(_ask_all, zeroconf, self._service)

    def check(self) -> None:
        """Ask for records that have faded; those asked for in vain the last time have ended."""
        with self._lock:
            names = list(self._names)
        for name in names:
            if self._info(name) is not None:
                self._silent.discard(name)
            elif name in self._silent:
                self._end(name, "it no longer answers on the network")
            else:
                self._silent.add(name)

    def _changed(self, *, name: str, state_change: Any, **_details: Any) -> None:
        """Zeroconf says that something about this name is new."""
        from zeroconf import ServiceStateChange

        if not is_label(name.removesuffix(f".{self._service}")):
            return
        if state_change is ServiceStateChange.Removed:
            self._end(name, "it left")
            return
        info = self._info(name)
        if info is None or len(info.text or b"") > MAX_TEXT:
            return
        hosts = [scoped(host) for host in info.parsed_scoped_addresses()[:MAX_RAW_HOSTS]]
        heard = read_record(info.properties, hosts, loopback=self._loopback)
        if heard is not None and self._on_heard(name, heard):
            self._keep(name, heard)

    def _info(self, name: str) -> ServiceInfo | None:
        """A record with all its parts; None, and the rest is asked for, while some are missing."""
        from zeroconf import ServiceInfo

        info = ServiceInfo(self._service, name)
        with self._lock:
            zeroconf = self._zeroconf
            if zeroconf is None:
                return None
            if info.load_from_cache(zeroconf) and info.text:
                self._asked.pop(name, None)
                return info
            if name not in self._asked and len(self._asked) >= MAX_ASKED:
                del self._asked[next(iter(self._asked))]
            self._asked[name] = None
        _ask(zeroconf, name, info.server)
        return None

    def _keep(self, name: str, heard: MdnsRecord) -> None:
        with self._lock:
            self._names.pop(name, None)  # the one heard last is the last in order
            self._names[name] = heard
            oldest = next(iter(self._names)) if len(self._names) > MAX_NAMES else None
        if oldest is not None:
            self._end(oldest, f"more than {MAX_NAMES} claim to be here")

    def _end(self, name: str, reason: str) -> None:
        with self._lock:
            known = self._names.pop(name, None)
            self._asked.pop(name, None)
        self._silent.discard(name)
        if known is not None:
            self._on_gone(name, reason)


# zeroconf's own way to ask for a record waits for the answer.  What its questions are made of is
# not in its list of public names, but there for those who want to ask without waiting.


def _ask(zeroconf: Zeroconf, name: str, server: str | None) -> None:
    """Ask for the parts of one record."""
    from zeroconf import DNSOutgoing, DNSQuestion  # type: ignore[attr-defined]

    question = DNSOutgoing(_QUERY)
    for kind in (_SRV, _TXT):
        question.add_question(DNSQuestion(name, kind, _INTERNET))
    if server and server != name:
        for kind in (_A, _AAAA):
            question.add_question(DNSQuestion(server, kind, _INTERNET))
    zeroconf.send(question)


def _ask_all(zeroconf: Zeroconf, service: str) -> None:
    """Ask for every record of a service; runs in zeroconf's loop."""
    from zeroconf import DNSOutgoing, DNSQuestion, current_time_millis  # type: ignore[attr-defined]

    now = current_time_millis()
    question = DNSOutgoing(_QUERY)
    question.add_question(DNSQuestion(service, _PTR, _INTERNET))
    for record in zeroconf.cache.get_all_by_details(service, _PTR, _INTERNET)[:MAX_NAMES]:
        if not record.is_stale(now):
            question.add_answer_at_time(record, now)
    zeroconf.async_send(question)


# --------------------------------------------------------------------------------------------------
# Multicast DNS as a source of discovery: shows our record, hears those of others, follows Wi-Fi.
#
# One thread opens zeroconf, and opens it again when the addresses of this machine change: a laptop
# that comes back to its Wi-Fi is found there without anybody doing anything.  Where there is no
# network at all, the processes of the machine still find each other over loopback.

LOOK_EVERY = 2.0  # seconds between two looks at the addresses of this machine
ASK_EVERY = 15.0  # seconds between two questions who is there, after the first few
CHECK_EVERY = 60.0  # seconds; half of the time for which an address is remembered unasked
CLOSING = 3.0  # seconds; announcing and saying goodbye take less than one

_logger = get_logger(__name__)

_HINT = "Give the addresses of the other machines: POTLUCK_PEERS=host:port,host:port"


class MdnsSource:
    """Shows one process on the local network and hears the others, until closed.

    ``on_heard`` and ``on_gone`` are those of :class:`~potluck.discovery.mdns.MdnsListener`.
    """

    def __init__(
        self,
        advert: Advert,
        config: DiscoveryConfig,
        on_heard: Callable[[str, MdnsRecord], bool],
        on_gone: Callable[[str, str], None],
        *,
        service: str = SERVICE,
    ) -> None:
        self._config = config
        self._service = service
        self._listening = MdnsListener(service, on_heard, on_gone)
        self._zeroconf: Zeroconf | None = None
        self._hosts: list[str] = []
        self._shown: ServiceInfo | None = None
        self._shown_advert: Advert | None = None
        self._wanted = advert
        self._is_closed = False
        self._status = "starting"
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="potluck-mdns", daemon=True)
        self._thread.start()

    @property
    def status(self) -> str:
        """What it does, or why it cannot, in words."""
        return self._status

    @property
    def is_open(self) -> bool:
        """Whether it listens at this moment."""
        return self._zeroconf is not None

    def update(self, advert: Advert) -> None:
        """Show this instead; at once."""
        with self._news:
            self._wanted = advert
            self._news.notify()

    def close(self) -> None:
        """Announce that we leave, and end."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._thread.join(CLOSING)

    def _run(self) -> None:
        ask_at, check_at = time.monotonic() + ASK_EVERY, time.monotonic() + CHECK_EVERY
        while not self._is_closed:
            advert = self._wanted
            try:
                self._follow_addresses()
                self._show(advert)
            except Exception as error:  # whatever it is, the other sources go on, and so do we
                _logger.exception("multicast DNS failed, and is opened anew")
                self._fail(error)
            if time.monotonic() >= ask_at:
                self._listening.ask()
                ask_at = time.monotonic() + ASK_EVERY
            if time.monotonic() >= check_at:
                self._listening.check()
                check_at = time.monotonic() + CHECK_EVERY
            with self._news:
                if not self._is_closed and self._wanted == advert:
                    self._news.wait(LOOK_EVERY)
        self._shut(goodbye=True)

    def _fail(self, error: Exception) -> None:
        """Begin anew at the next look."""
        self._shut(goodbye=False)
        self._status = f"this process could not be announced: {str(error) or type(error).__name__}"

    def _follow_addresses(self) -> None:
        """Open where there is something new to open on."""
        config = self._config
        try:
            hosts = usable_hosts(virtual=config.virtual, only=config.interfaces) or [LOOPBACK]
        except OSError:  # an interface may vanish while it is looked at
            return
        if hosts == self._hosts and self._zeroconf is not None:
            return
        self._shut(goodbye=False)
        self._hosts = hosts
        try:
            self._zeroconf = open_zeroconf(hosts, hint=_HINT, both=True)
        except DiscoveryUnavailable as error:
            self._status = str(error)
            return
        self._listening.start(self._zeroconf, loopback=is_loopback(hosts[0]))
        self._status = f"listening on {', '.join(hosts)}"

    def _show(self, advert: Advert) -> None:
        """Announce this, unless it is shown already."""
        from zeroconf import Error

        if self._zeroconf is None or advert == self._shown_advert:
            return
        info = self._info(advert)
        old, before = self._shown_advert, self._shown
        if old is not None and (old.tag, old.job_tag) != (advert.tag, advert.job_tag):
            self._listening.stop()  # what was a stranger's may be of interest now
            self._listening.start(self._zeroconf, loopback=is_loopback(self._hosts[0]))
        self._shown, self._shown_advert = info, advert
        try:
            if before is not None and (info is None or before.name != info.name):
                self._zeroconf.unregister_service(before)
                before = None
            if info is not None and before is not None:
                self._zeroconf.update_service(info)
            elif info is not None:
                # The name is this process's own, so there is nobody to ask whether it is taken.
                self._zeroconf.register_service(info, cooperating_responders=True)
        except (Error, OSError, RuntimeError) as error:
            self._fail(error)

    def _info(self, advert: Advert) -> ServiceInfo | None:
        from zeroconf import ServiceInfo

        if not advert.port or not self._config.announce:
            return None
        hosts = self._hosts
        if advert.hosts:
            only_here = is_loopback(hosts[0])
            hosts = [h for h in by_preference(advert.hosts) if is_loopback(h) == only_here]
        if not hosts:
            return None  # it listens where nobody hears us
        label = label_of(advert)
        return ServiceInfo(
            self._service,
            f"{label}.{self._service}",
            port=advert.port,
            properties=properties_of(advert),
            server=f"potluck-{label[-12:]}.local.",  # not this machine's own name
            parsed_addresses=[unscoped(host) for host in hosts],
        )

    def _shut(self, *, goodbye: bool) -> None:
        zeroconf, self._zeroconf = self._zeroconf, None
        shown, self._shown, self._shown_advert = self._shown, None, None
        if zeroconf is None:
            return
        from zeroconf import Error

        self._listening.stop()
        with contextlib.suppress(Error, OSError, RuntimeError):
            if shown is not None and not goodbye:
                # We stay, only our addresses change: nobody should think that we are gone.
                _withdraw_silently(zeroconf, shown)
            zeroconf.close()


def _withdraw_silently(zeroconf: Zeroconf, shown: ServiceInfo) -> None:
    done = threading.Event()

    def forget() -> None:
        zeroconf.registry.async_remove(shown)
        done.set()

    if zeroconf.loop is not None:
        zeroconf.loop.call_soon_threadsafe(forget)
        done.wait(1.0)
