"""Listening to the records of others: which names there are, what they say, and when they end.

Runs on zeroconf's threads and never waits: a record that is not complete yet is asked for, and
looked at again when the answer comes.  A record counts until its owner takes it back, or no longer
answers when asked.  The number of names that are kept, and of those asked for, is bounded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from potluck.net.mdns import scoped
from potluck.net.mdns_records import MAX_TEXT, Heard, is_label, read_record

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

__all__ = ["MAX_NAMES", "Listening"]

MAX_NAMES = 256
"""Records of interest that are kept; a flood of them pushes out the oldest, and costs no more."""

MAX_ASKED = 64
"""Incomplete records that are asked for at a time."""

# Numbers of the protocol (RFC 1035): a question; kinds of records; the only class in use.
_QUERY = 0
_A, _PTR, _TXT, _AAAA, _SRV = 1, 12, 16, 28, 33
_INTERNET = 1

MAX_RAW_HOSTS = 32  # addresses of one record that are looked at before the best are chosen


class Listening:
    """The records of one service type, as one zeroconf hears them.

    ``on_heard`` gets a record's name and what it says, and tells whether that is of interest: only
    then is ``on_gone`` called when it ends, with the reason.
    """

    def __init__(
        self,
        service: str,
        on_heard: Callable[[str, Heard], bool],
        on_gone: Callable[[str, str], None],
    ) -> None:
        self._service = service
        self._on_heard = on_heard
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._zeroconf: Zeroconf | None = None
        self._loopback = False
        self._browser: Any = None
        self._names: dict[str, Heard] = {}
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
            self._end(name, "it said goodbye")
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

    def _keep(self, name: str, heard: Heard) -> None:
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
