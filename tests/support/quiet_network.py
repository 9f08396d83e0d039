"""Multicast DNS for one test alone: on loopback, under a service type of its own, in a hurry."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import zeroconf

from potluck.discovery import mdns
from potluck.discovery.mdns import MdnsRecord, MdnsSource, label_of, properties_of
from potluck.discovery.records import Advert, DiscoveryConfig
from support.discovering import advert
from support.threads import eventually

CONFIG = DiscoveryConfig(home=Path("/nowhere"))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The service type; every thread of zeroconf has ended at the end."""
    monkeypatch.setattr(mdns, "usable_hosts", lambda **_: [])
    hurry(monkeypatch)
    before = threading.active_count()
    yield f"_pl{secrets.token_hex(4)}._tcp.local."
    eventually(lambda: threading.active_count() <= before)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long pauses between repetitions of what is said."""
    for pause in ("_REGISTER_TIME", "_UNREGISTER_TIME"):
        monkeypatch.setattr(f"zeroconf._core.{pause}", 20)


class Stranger:
    """Somebody who says anything at all, on loopback."""

    def __init__(self, service: str) -> None:
        self._service = service
        self.zeroconf = zeroconf.Zeroconf(interfaces=["127.0.0.1"])
        self.said: list[zeroconf.ServiceInfo] = []

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take everything back."""
        self.zeroconf.close()

    def say(self, label: str, fields: dict[str, str] | bytes, *hosts: str, port: int = 1) -> None:
        """Announce a record, and answer for it."""
        info = self._info(label, fields, *hosts, port=port)
        self.said.append(info)
        self.zeroconf.register_service(info, cooperating_responders=True, strict=False)

    def shout(self, shown: Advert) -> None:
        """Announce what looks like a process of ours, once, without waiting."""
        info = self._info(label_of(shown), properties_of(shown), port=shown.port)
        self.zeroconf.send(self.zeroconf.generate_service_broadcast(info, None))

    def _info(
        self, label: str, fields: dict[str, str] | bytes, *hosts: str, port: int
    ) -> zeroconf.ServiceInfo:
        return zeroconf.ServiceInfo(
            self._service,
            f"{label}.{self._service}",
            port=port,
            properties=fields,
            server=f"{label[-12:]}.local.",
            parsed_addresses=list(hosts or ("127.0.0.1",)),
        )

    def forge(self, shown: Advert, *hosts: str, **changes: str) -> None:
        """Announce what looks like a process of ours, with some fields changed."""
        self.say(label_of(shown), {**properties_of(shown), **changes}, *hosts, port=shown.port or 1)


class Ear:
    """A source, and what it has heard."""

    def __init__(self, service: str, shown: Advert | None = None) -> None:
        self.heard: dict[str, MdnsRecord] = {}
        self.gone: dict[str, str] = {}
        self.source = MdnsSource(
            shown or advert("e", port=0), CONFIG, self._hear, self._miss, service=service
        )

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.source.close()

    def _hear(self, name: str, heard: MdnsRecord) -> bool:
        self.heard[name] = heard
        return True

    def _miss(self, name: str, reason: str) -> None:
        self.gone[name] = reason
        self.heard.pop(name, None)

    def hears(self, *adverts: Advert) -> bool:
        """Whether exactly these are heard now, with their jobs and ports."""
        found = {
            (each.node, each.incarnation, each.job_tag, each.addresses[0].port)
            for each in list(self.heard.values())
        }
        return found == {(*each.process, each.job_tag, each.port) for each in adverts}
