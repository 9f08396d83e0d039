"""A link: one peer's connection, its writer and reader, and the lock that guards the writer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from potluck.backend.reader import FrameHandler, FrameReader
from potluck.backend.writer import FrameWriter

if TYPE_CHECKING:
    from potluck.errors import DistributedError
    from potluck.net.sealing import Opener, Sealer
    from potluck.net.transport import Poller, Stream

__all__ = ["Link"]


class Link:
    """One peer's connection.

    ``lock`` guards ``writer``; ``reader`` belongs to the thread that runs the pump.
    """

    def __init__(
        self,
        rank: int,
        stream: Stream,
        poller: Poller,
        seal: tuple[Sealer, Opener] | None = None,
    ) -> None:
        self.rank = rank
        self.stream = stream
        self.lock = threading.Lock()
        self.lost: DistributedError | None = None
        self.epoch = 0
        self._poller = poller
        self._seal = seal
        self.writer = self._make_writer()
        self.reader: FrameReader

    def connect(self, handler: FrameHandler, max_eager: int) -> None:
        """Say who handles what comes in."""
        if self._seal is None:
            self.reader = FrameReader(self.stream, handler, max_eager)
        else:
            from potluck.backend.sealed import SealedReader

            self.reader = SealedReader(self.stream, handler, max_eager, self._seal[1])

    def _make_writer(self) -> FrameWriter:
        if self._seal is None:
            return FrameWriter(self.stream, self._watch)
        from potluck.backend.sealed import SealedWriter

        return SealedWriter(self.stream, self._watch, self._seal[0])

    def _watch(self, wanted: bool) -> None:  # noqa: FBT001
        self._poller.want_write(self.stream, self.rank, wanted)

    def tell(self, header: bytes) -> None:
        """Send a frame without payload."""
        with self.lock:
            self.writer.write(header)
