"""Multicast DNS as a source of discovery: shows our record, hears those of others, follows Wi-Fi.

One thread opens zeroconf, and opens it again when the addresses of this machine change: a laptop
that comes back to its Wi-Fi is found there without anybody doing anything.  Where there is no
network at all, the processes of the machine still find each other over loopback.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from potluck.logs import get_logger
from potluck.net.addresses import by_preference, is_loopback, usable_hosts
from potluck.net.discovery_config import DiscoveryConfig
from potluck.net.discovery_records import Advert
from potluck.net.mdns import LOOPBACK, DiscoveryUnavailable, open_zeroconf, unscoped
from potluck.net.mdns_listening import Listening
from potluck.net.mdns_records import SERVICE, Heard, label_of, properties_of

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

__all__ = ["MdnsSource"]

LOOK_EVERY = 2.0  # seconds between two looks at the addresses of this machine
ASK_EVERY = 15.0  # seconds between two questions who is there, after the first few
CHECK_EVERY = 60.0  # seconds; half of the time for which an address is remembered unasked
CLOSING = 3.0  # seconds; announcing and saying goodbye take less than one

_logger = get_logger(__name__)

_HINT = "Give the addresses of the other machines: POTLUCK_PEERS=host:port,host:port"


class MdnsSource:
    """Shows one process on the local network and hears the others, until closed.

    ``on_heard`` and ``on_gone`` are those of :class:`~potluck.net.mdns_listening.Listening`.
    """

    def __init__(
        self,
        advert: Advert,
        config: DiscoveryConfig,
        on_heard: Callable[[str, Heard], bool],
        on_gone: Callable[[str, str], None],
        *,
        service: str = SERVICE,
    ) -> None:
        self._config = config
        self._service = service
        self._listening = Listening(service, on_heard, on_gone)
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
        """Say goodbye and end."""
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
