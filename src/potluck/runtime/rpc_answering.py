"""Sending answers on a connection, each once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from potluck.core.calls import Window
from potluck.core.calls_encoding import RESPONSE_OVERHEAD, response_head
from potluck.core.calls_failures import Failure, reply_with
from potluck.core.calls_frames import SHORT, FrameKind, Hello, pack_frame, short_response
from potluck.core.calls_outbox import Outbox

if TYPE_CHECKING:
    from potluck.runtime.rpc_calls import Incoming

__all__ = ["Answering"]


class Answering:
    """The half of a connection that answers the calls of the other side."""

    rank: int
    lock: threading.Lock
    allowance: Hello | None
    received: dict[int, Incoming]
    _here: int
    _admitted: Window
    _outbox: Outbox

    def flush(self) -> None:
        """Send what can be sent now."""
        raise NotImplementedError

    def _send_short(self, frame: bytes) -> None:
        """Send a whole frame, behind what waits."""
        raise NotImplementedError

    def answer(self, call: Incoming, parts: list[Any], *, cork: bool = False) -> None:
        """Send a value."""
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        assert self.allowance is not None
        limit = self.allowance.max_message
        total = RESPONSE_OVERHEAD + size
        if total > limit:
            self.refuse(call, Failure("large", size=total, limit=limit), cork=cork)
        elif total <= SHORT:
            payload = parts[0] if len(parts) == 1 else b"".join(parts)
            self._reply(call, short_response(call.number, payload, call.marks), cork=cork)
        else:
            head = response_head(call.number, size)
            views = [memoryview(head), *(memoryview(part) for part in parts)]
            with self.lock:
                if self._take(call):
                    self._outbox.add_long(FrameKind.RESPONSE, call.number, views, marks=call.marks)
                    self.flush()

    def refuse(self, call: Incoming, failure: Failure, *, cork: bool = False) -> None:
        """Say why there is no value."""
        limit = None if self.allowance is None else self.allowance.max_message
        body = reply_with(call.number, failure, self._here, limit)
        if len(body) <= SHORT:
            frame = pack_frame(FrameKind.RESPONSE, call.number, len(body))
            self._reply(call, frame + body, cork=cork)
            return
        with self.lock:
            if self._take(call):
                self._outbox.add_long(FrameKind.RESPONSE, call.number, [memoryview(body)])
                self.flush()

    def _reply(self, call: Incoming, frame: bytes, *, cork: bool) -> None:
        with self.lock:
            if not self._take(call):
                return
            if cork:
                self._outbox.add_short(frame)
            else:
                self._send_short(frame)

    def _take(self, call: Incoming) -> bool:
        """Whether the call is still to be answered; afterwards it is not."""
        if self.received.pop(call.number, None) is not call:
            return False
        self._admitted.remove(call.size)
        return True
