"""Functions that other ranks may call, and how a call of one becomes an answer."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from potluck.backend.base import read_view
from potluck.core.calls import Pace, name_in_bytes
from potluck.core.calls_encoding import REQUEST_OVERHEAD, RESPONSE_OVERHEAD
from potluck.core.calls_errors import RpcInvalidMessage, near_names
from potluck.core.calls_failures import Failure
from potluck.core.calls_frames import Mark
from potluck.runtime.rpc_calls import Incoming, here
from potluck.runtime.rpc_values import Values

if TYPE_CHECKING:
    from potluck.metrics import OperationMetrics

__all__ = ["CANCELLED", "Handlers", "RpcHandler"]

CANCELLED = Failure("cancelled", words="The caller cancelled the call")

RpcHandler: TypeAlias = Callable[..., Any]
"""A function that can be called from elsewhere: of bytes, which returns bytes; or of values."""


class Handler:
    """One of them."""

    __slots__ = ("function", "is_typed", "pace")

    def __init__(self, function: RpcHandler, *, is_typed: bool) -> None:
        self.function = function
        self.is_typed = is_typed
        self.pace = Pace()


class Handlers:
    """All functions of an agent, by name."""

    def __init__(self, values: Values) -> None:
        self._known: dict[str, Handler] = {}
        self._lock = threading.Lock()
        self._values = values
        self.counts: OperationMetrics | None = None
        """Where the calls that were answered are counted."""

    def add(self, name: str, function: RpcHandler, *, is_typed: bool) -> None:
        """Add a function; one of the same name gives way."""
        name_in_bytes(name)
        if not callable(function):
            msg = f"'{name}' is to be registered with something to call, not {function!r}"
            raise TypeError(msg)
        if is_typed:
            self._values.learn_from(function)
        with self._lock:
            self._known = {**self._known, name: Handler(function, is_typed=is_typed)}

    def get(self, name: str) -> Handler | None:
        """The function of that name."""
        return self._known.get(name)

    def is_quick(self, call: Incoming) -> bool:
        """Whether a call may run where it was read."""
        handler = self._known.get(call.name)
        return handler is None or handler.pace.is_quick

    def run(self, call: Incoming, *, cork: bool = False) -> None:
        """Answer a call; only in form if nobody waits for it any more."""
        payload = call.payload
        if call.cancelled:  # after that look at the payload, which is empty by then
            call.origin.refuse(call, CANCELLED, cork=cork)
            return
        handler = self._known.get(call.name)
        if handler is None:
            near = near_names(call.name, self._known)
            call.origin.refuse(call, Failure("missing", name=call.name, near=near), cork=cork)
            self._count(0.0, call, "RpcFunctionNotFound")
            return
        before, here.call = here.call, call
        began, failure = time.perf_counter(), ""
        try:
            parts = self._call(handler, call, payload)
        except RpcInvalidMessage as error:
            failure = type(error).__name__
            call.origin.refuse(call, Failure("invalid", words=error.reason), cork=cork)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets to know
            failure = type(error).__name__
            call.origin.refuse(call, _raised(error), cork=cork)
        else:
            call.origin.answer(call, parts, cork=cork)
        finally:
            taken = time.perf_counter() - began
            handler.pace.observe(taken)
            self._count(taken, call, failure)
            here.call = before
            call.payload = b""  # whoever keeps the call shall not keep its bytes

    def _count(self, seconds: float, call: Incoming, failure: str) -> None:
        if self.counts is not None:
            self.counts.note(seconds, call.size, failure)

    def _call(self, handler: Handler, call: Incoming, payload: Any) -> list[Any]:
        if handler.is_typed is not bool(call.marks & Mark.TYPED):
            kind, way = ("values", "call") if handler.is_typed else ("bytes", "rpc_sync")
            raise RpcInvalidMessage(f"'{call.name}' is a function of {kind}: use {way}")
        if not handler.is_typed:
            result = handler.function(payload if type(payload) is bytes else bytes(payload))
            return [result if type(result) is bytes else _octets(call.name, result)]
        lead = REQUEST_OVERHEAD + len(call.name.encode())
        arguments, options = self._values.unpack_arguments(payload, lead)
        return self._values.pack(handler.function(*arguments, **options), RESPONSE_OVERHEAD)


def _octets(name: str, result: Any) -> memoryview:
    try:
        return read_view(result)
    except (TypeError, ValueError):
        msg = f"'{name}' must return bytes, not {type(result).__name__}"
        raise TypeError(msg) from None


def _raised(error: BaseException) -> Failure:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        words = str(error)
    except Exception as second:  # noqa: BLE001 - an error that cannot even say what it is
        words = f"(no words: {type(second).__name__})"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - nor show where it was raised
        trace = ""
    return Failure("raised", name=name, words=words, traceback=trace)
