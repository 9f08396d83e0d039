"""Collectives that a user's backend has written anew: a context on it calls these."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from potluck.runtime.work import Work

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.metrics import DistributedMetrics, OperationMetrics

__all__ = ["OVERRIDABLE", "overridden"]

OVERRIDABLE = ("all_reduce", "barrier")
"""What a backend of the origin defines itself; everything else stands on messages."""

_DEFAULTS: tuple[object, ...] = (None, False, "sum")


def overridden(
    backend: Backend, name: str, metrics: Callable[[], DistributedMetrics | None]
) -> Callable[..., Any] | None:
    """The backend's own method, counted where that is wanted; None if it is the library's."""
    if name not in vars(backend):
        home = next((each for each in type(backend).__mro__ if name in vars(each)), None)
        if home is None or home.__module__.partition(".")[0] == "potluck":
            return None
    method = getattr(backend, name)

    @functools.wraps(method)
    def call(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
        arguments, options = _fitting(method, arguments, options)
        run = functools.partial(_run, name, method, arguments, options, metrics())
        return _start(name, run) if async_op else run()

    return call


def _run(
    name: str,
    method: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    metrics: DistributedMetrics | None,
) -> Any:
    given = next(iter((*arguments, *options.values())), None) if name == "all_reduce" else None
    began, failure = monotonic(), ""
    try:
        result = method(*arguments, **options)
    except BaseException as error:
        failure = type(error).__name__
        raise
    else:
        return given if result is None else result  # in place, as the origin does it
    finally:
        if metrics is not None:
            entry: OperationMetrics = getattr(metrics, name)
            entry.note(monotonic() - began, _size(given), failure)


def _fitting(
    method: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the method takes them: what only repeats a default may be left out."""
    try:
        inspect.signature(method).bind(*arguments, **options)
    except TypeError:
        options = {key: each for key, each in options.items() if not _is_default(each)}
        arguments = tuple(each for each in arguments if not _is_default(each))
    except ValueError:  # it has no signature that Python knows
        pass
    return arguments, options


def _is_default(value: object) -> bool:
    return value is None or (isinstance(value, bool | str) and value in _DEFAULTS)


def _start(name: str, run: Callable[[], Any]) -> Work[Any]:
    work: Work[Any] = Work(lambda: name)

    def follow() -> None:
        try:
            work.succeed(run())
        except BaseException as error:  # noqa: BLE001 - who waits raises it
            work.fail(error)

    threading.Thread(target=follow, name=f"potluck-{name}", daemon=True).start()
    return work


def _size(array: object) -> int:
    size = getattr(array, "nbytes", None)
    if isinstance(size, int):
        return size
    try:
        return memoryview(array).nbytes  # type: ignore[arg-type]
    except TypeError:
        return 0
