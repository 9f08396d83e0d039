"""The dashboard as a program without a browser asks it: over HTTP, and by the stream of events."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any, Self

from potluck.apps.dashboard.server import Dashboard, DashboardConfig
from potluck.cluster.config import AutoDiscoveryConfig
from support.clusters import OPTIONS
from support.threads import PATIENCE


def dashboard(job: str | None = None, **options: Any) -> Dashboard:
    """A dashboard at a free port, of what the files of neighbours show."""
    observing = AutoDiscoveryConfig(
        job=job or "dashboard", multicast=OPTIONS["multicast"], known=OPTIONS["known"]
    )
    return Dashboard(observing, DashboardConfig(**{"port": 0, **options}), job=job)


class Answer:
    """What came back."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def text(self) -> str:
        """As a person reads it."""
        return self.body.decode()

    def json(self) -> Any:
        """As a program reads it."""
        return json.loads(self.body)


def ask(
    port: int, path: str = "/", headers: Mapping[str, str] | None = None, method: str = "GET"
) -> Answer:
    """One request; nothing follows redirects or keeps cookies."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        given = dict(headers or {})
        connection.putrequest(method, path, skip_host="host" in given)
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders()
        return Answer(connection.getresponse())
    finally:
        connection.close()


class Stream:
    """A page that looks on; a context manager."""

    def __init__(self, port: int, last: str = "", headers: Mapping[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        given = {**({"Last-Event-ID": last} if last else {}), **(headers or {})}
        self._connection.request("GET", "/api/events", headers=given)
        self.response = self._connection.getresponse()

    def next(self, *kinds: str) -> tuple[str, str, Any]:
        """Kind, mark and data of the next event, or of the next one of these kinds."""
        while True:
            fields: dict[str, str] = {}
            while line := self.response.readline().decode().rstrip("\n"):
                name, _, value = line.partition(": ")
                fields[name] = value
            if "event" in fields and (not kinds or fields["event"] in kinds):
                return fields["event"], fields["id"], json.loads(fields["data"])
            assert fields, "the stream has ended"

    def close(self) -> None:
        """Look no more."""
        self.response.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(port: int, *, room: int | None = None) -> socket.socket:
    """A bare connection; ``room`` bounds what it takes without reading."""
    sock = socket.socket()
    sock.settimeout(PATIENCE)
    if room is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    try:
        sock.connect(("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    return sock
