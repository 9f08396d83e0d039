"""A window on a run: the dashboard, in a process of its own beside this one.

A web server in the process that trains would take turns with it at the interpreter.  So the
dashboard looks on from outside, like any observer; it is told on its standard input what to look
at, and ends when that does, whatever becomes of this process.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import queue
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from potluck.decoding import decode_json
from potluck.errors import BackendUnavailable
from potluck.logs import get_logger
from potluck.net import descriptors
from potluck.net.namespace import NetworkNamespace, Protection

if TYPE_CHECKING:
    from potluck.runtime.auto_config import AutoDiscoveryConfig

__all__ = ["Errand", "Outlook", "Wanted", "Window", "errand_for", "find_web_server", "place_of"]

logger = get_logger("potluck.dashboard")

Wanted: TypeAlias = bool | int | str
"""Whether and where: True for this machine alone, or a port, or ``host`` or ``host:port``."""

OPEN_WITHIN = 20.0
"""Seconds for the dashboard to start."""

CLOSE_WITHIN = 3.0

WEB_SERVER = ("starlette", "uvicorn")
MODULE = "potluck.apps.dashboard"  # above this layer: started, never imported

Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Errand(msgspec.Struct, frozen=True, kw_only=True):
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


class Outlook(msgspec.Struct, frozen=True, omit_defaults=True):
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
    """Address and port that somebody wants.

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


def errand_for(
    wanted: Wanted, config: AutoDiscoveryConfig, namespace: NetworkNamespace, port: int
) -> Errand:
    """What to tell the dashboard of a node that listens at ``port``."""
    host, wanted_port = place_of(wanted)
    is_strange = namespace.protection.has_own_secret and not namespace.is_kept
    return Errand(
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


class Window:
    """The dashboard's process; ends with :meth:`close`, or with us."""

    def __init__(self, errand: Errand) -> None:
        find_web_server()
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, which then closes this
        )
        assert self._process.stdin is not None
        descriptors.track(self._process.stdin)  # a forked child must not keep it open
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name="potluck-window", daemon=True)
        self._thread.start()
        with contextlib.suppress(OSError):
            self._process.stdin.write(msgspec.json.encode(errand) + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        self._answers.put(self._process.stdout.readline(1 << 16))

    def wait(self, within: float = OPEN_WITHIN) -> str:
        """The address of the dashboard once it is there."""
        try:
            outlook = decode_json(self._answers.get(timeout=within), Outlook)
        except (queue.Empty, msgspec.DecodeError):
            outlook = Outlook(trouble="its process did not start")
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
