"""A gate between two processes of one machine: closed at first, and then bytes pass."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

from support.ports import free_port


class Gate:
    """Listens where one process looks for the other, once it is open, and passes bytes on."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.port = free_port()
        self._server: socket.socket | None = None
        self._sockets: list[socket.socket] = []

    def open(self) -> None:
        """Let bytes pass from now on."""
        self._server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                here, _ = server.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [here, there]
                for source, sink in ((here, there), (there, here)):
                    threading.Thread(target=_pass, args=(source, sink), daemon=True).start()

    def __enter__(self) -> Self:
        """Closed at first."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it and all connections."""
        for each in (self._server, *self._sockets):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()


def _pass(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
