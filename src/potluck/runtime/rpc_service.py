"""A rank's functions as methods of an object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from potluck.runtime.rpc_calls import RpcFuture

__all__ = ["Remote", "Service"]


class Start(Protocol):
    """Makes a call."""

    def __call__(self, name: str, args: Any, kwargs: Any, *, later: bool) -> Any:
        """Return its value, or a future if it is for later."""


class Remote:
    """One function elsewhere."""

    __slots__ = ("_name", "_start")

    def __init__(self, start: Start, name: str) -> None:
        self._start = start
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it and return what it returns."""
        return self._start(self._name, args, kwargs, later=False)

    def later(self, *args: Any, **kwargs: Any) -> RpcFuture[Any]:
        """Start the call."""
        future: RpcFuture[Any] = self._start(self._name, args, kwargs, later=True)
        return future


class Service:
    """Every attribute is a function elsewhere."""

    __slots__ = ("_start",)

    def __init__(self, start: Start) -> None:
        self._start = start

    def __getattr__(self, name: str) -> Remote:
        """The function of that name, whether it exists or not."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(self._start, name)
