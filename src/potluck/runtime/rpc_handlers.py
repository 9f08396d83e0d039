"""Functions that other ranks may call, and how a call of one becomes an answer."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from potluck.backend.base import read_view
from potluck.core.calls import Pace, name_in_bytes
from potluck.core.calls_encoding import REQUEST_OVERHEAD, RESPONSE_OVERHEAD
from potluck.core.calls_errors import RpcInvalidMessage, near_names, shortened
from potluck.core.calls_failures import Failure
from potluck.core.calls_frames import Mark
from potluck.logs import get_logger
from potluck.runtime.rpc_calls import Incoming, here
from potluck.runtime.rpc_values import Values, taken_bytes

if TYPE_CHECKING:
    from potluck.metrics import OperationMetrics

__all__ = ["CANCELLED", "Handlers", "RpcHandler"]

logger = get_logger(__name__)

_MOST_ERRORS = 20_000
"""Errors that are looked at: causes, contexts and members of groups, as often as they occur."""

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
        """Answer a call, whatever its function raises or returns.

        Nothing is raised here: the thread that runs it serves other calls as well.
        """
        payload = call.payload
        before, here.call = here.call, call
        began = time.perf_counter()
        try:
            outcome, handler = self._outcome(call, payload)
        finally:
            here.call = before
            call.payload = b""  # whoever keeps the call shall not keep its bytes
        taken = time.perf_counter() - began
        _reply(call, outcome, cork)
        if outcome is CANCELLED:
            return
        if handler is not None:
            handler.pace.observe(taken)
        if self.counts is not None:
            self.counts.note(taken, call.size, "" if type(outcome) is list else _kind_of(outcome))

    def _outcome(self, call: Incoming, payload: Any) -> tuple[list[Any] | Failure, Handler | None]:
        """What a call is answered with, and which function was called for that."""
        handler = None
        try:
            if call.cancelled:  # after that look at the payload, which is empty by then
                return CANCELLED, None
            handler = self._known.get(call.name)
            if handler is None:
                near = near_names(call.name, self._known)
                return Failure("missing", name=call.name, near=near), None
            return self._call(handler, call, payload), handler
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets to know
            return _raised(error), handler

    def _call(self, handler: Handler, call: Incoming, payload: Any) -> list[Any] | Failure:
        if handler.is_typed is not bool(call.marks & Mark.TYPED):
            kind, way = ("values", "call") if handler.is_typed else ("bytes", "rpc_sync")
            return Failure("invalid", words=f"'{call.name}' is a function of {kind}: use {way}")
        if not handler.is_typed:
            call.payload = b""  # or it would be here twice
            result = handler.function(payload if type(payload) is bytes else taken_bytes(payload))
            return [result if type(result) is bytes else _octets(call.name, result)]
        lead = REQUEST_OVERHEAD + len(call.name.encode())
        try:
            arguments, options = self._values.unpack_arguments(payload, lead)
        except RpcInvalidMessage as error:  # of the arguments; the function may raise its own
            return Failure("invalid", words=error.reason)
        return self._values.pack(handler.function(*arguments, **options), RESPONSE_OVERHEAD)


def _reply(call: Incoming, outcome: list[Any] | Failure, cork: bool) -> None:  # noqa: FBT001
    """Send what a call is answered with; if that fails, say so."""
    try:
        if type(outcome) is list:
            call.origin.answer(call, outcome, cork=cork)
        else:
            assert isinstance(outcome, Failure)
            call.origin.refuse(call, outcome, cork=cork)
    except BaseException as error:
        logger.exception("The answer to '%s' could not be sent", shortened(call.name))
        words = f"the answer could not be sent: {_name_of(type(error))}"
        with contextlib.suppress(BaseException):
            call.origin.refuse(call, Failure("internal", words=words), cork=cork)


def _kind_of(outcome: list[Any] | Failure) -> str:
    """The name of an error, as metrics count it; empty if all went well."""
    if type(outcome) is list:
        return ""
    assert isinstance(outcome, Failure)
    names = {"missing": "RpcFunctionNotFound", "invalid": "RpcInvalidMessage"}
    return names.get(outcome.reason) or outcome.name.rpartition(".")[2]


def _octets(name: str, result: Any) -> memoryview:
    try:
        return read_view(result)
    except (TypeError, ValueError):
        msg = f"'{name}' must return bytes, not {type(result).__name__}"
        raise TypeError(msg) from None


def _raised(error: BaseException) -> Failure:
    """What a function raised, as far as that can be told: each of its texts may raise in turn."""
    kind = type(error)
    name = _name_of(kind)
    with contextlib.suppress(BaseException):
        if kind.__module__ not in ("builtins", "__main__"):
            name = f"{kind.__module__}.{name}"
    try:
        words = str.__str__(str(error))
    except BaseException as second:  # noqa: BLE001 - an error that cannot even say what it is
        words = f"(no words: {_name_of(type(second))})"
    trace = ""
    with contextlib.suppress(BaseException):  # nor show where it was raised
        trace = "".join(
            traceback.format_tb(error.__traceback__)
            if _is_vast(error)
            else traceback.format_exception(error)
        )
    return Failure("raised", name=name, words=words, traceback=trace)


def _is_vast(error: BaseException) -> bool:
    """Whether an error stands for more errors than can be told, as groups of groups do."""
    waiting: list[BaseException | None] = [error]
    for _ in range(_MOST_ERRORS):
        if not waiting:
            return False
        each = waiting.pop()
        if each is not None:
            waiting += (each.__cause__, each.__context__)
            waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return True


def _name_of(kind: type) -> str:
    try:
        return str.__str__(kind.__qualname__)
    except BaseException:  # noqa: BLE001 - a class may make anything of its name
        return "BaseException"
