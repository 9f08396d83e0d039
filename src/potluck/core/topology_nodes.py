"""What a machine can do, as it tells the others: a typed, bounded record that travels as bytes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.decoding import decode_msgpack
from potluck.errors import MalformedFrame

__all__ = ["PROFILE_LIMIT", "Accelerator", "Battery", "NodeProfile"]

PROFILE_LIMIT = 8192
"""Bytes that a profile takes at most; more is refused unread."""

_TEXT_LIMIT = 128  # characters
_ACCELERATORS = 16

_Text = Annotated[str, msgspec.Meta(max_length=_TEXT_LIMIT)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]


class Accelerator(msgspec.Struct, frozen=True, omit_defaults=True):
    """A processor beside the processor."""

    kind: _Text
    """The word that programs use for it: cuda, rocm, mps, xpu."""
    name: _Text = ""
    memory: _Bytes = 0
    """Bytes; 0 where not known or shared with the machine's own."""

    def __post_init__(self) -> None:
        """Refuse text that could play tricks on a terminal."""
        _refuse_unprintable(self.kind, self.name)


class Battery(msgspec.Struct, frozen=True, omit_defaults=True):
    """A machine that can be carried away."""

    percent: _Percent
    plugged: bool = False


class NodeProfile(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A machine, and the Python on it.  Zero and empty text mean: not known.

    >>> profile = NodeProfile(host="attic", cores=8, memory=16 << 30)
    >>> NodeProfile.from_bytes(profile.to_bytes()) == profile
    True
    >>> print(profile)
    attic: 8 cores, 16.0 GiB
    """

    host: _Text = ""
    system: _Text = ""
    """Operating system and its release."""
    machine: _Text = ""
    """Architecture, such as x86_64."""
    processor: _Text = ""
    """What it is sold as."""
    python: _Text = ""
    cores: _Count = 0
    """That run at once, as the operating system counts and this process may use them."""
    physical_cores: _Count = 0
    memory: _Bytes = 0
    available_memory: _Bytes = 0
    """When the profile was made."""
    accelerators: Annotated[tuple[Accelerator, ...], msgspec.Meta(max_length=_ACCELERATORS)] = ()
    battery: Battery | None = None
    """None on machines without one."""

    def __post_init__(self) -> None:
        """Refuse text that could play tricks on a terminal."""
        _refuse_unprintable(self.host, self.system, self.machine, self.processor, self.python)

    def to_bytes(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeProfile:
        """Read what a peer sent; anything odd is refused."""
        if len(data) > PROFILE_LIMIT:
            raise MalformedFrame(
                f"A node profile of {len(data)} bytes; {PROFILE_LIMIT} are allowed",
                expected=PROFILE_LIMIT,
                got=len(data),
            )
        try:
            return decode_msgpack(data, cls)
        except msgspec.MsgspecError as error:
            raise MalformedFrame(f"A node profile that makes no sense: {error}") from None

    def __str__(self) -> str:
        """One line for people, with what is known."""
        parts = [
            f"{self.cores} core{'s' * (self.cores != 1)}" if self.cores else "",
            f"{self.memory / (1 << 30):.1f} GiB" if self.memory else "",
            *(accelerator.name or accelerator.kind for accelerator in self.accelerators),
            _charge(self.battery) if self.battery else "",
            self.system,
            f"Python {self.python}" if self.python else "",
        ]
        return f"{self.host or 'a machine'}: " + (", ".join(filter(None, parts)) or "nothing known")


def _charge(battery: Battery) -> str:
    return f"battery {battery.percent} %{' (plugged in)' if battery.plugged else ''}"


def _refuse_unprintable(*texts: str) -> None:
    if not all(text.isprintable() for text in texts):
        msg = "a node profile is written in printable characters"
        raise ValueError(msg)
