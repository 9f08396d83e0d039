"""The version of this package, and with which other versions it works.

Machines are upgraded one at a time, so two builds that meet may differ.  Each build speaks a range
of protocol versions: from ``OLDEST_PROTOCOL`` to ``PROTOCOL``.  Two builds work together if the
ranges overlap; they then speak the lower of the two newest ones.  Every frame that opens a
connection carries the range, in a header that never changes (:mod:`potluck.net.frames`), so that
two builds which cannot work together can at least say so.  docs/internals/protocol.md has the rule
for a change of a message or a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.errors import HandshakeRefused, IoError

__version__ = "0.1.0"

PROTOCOL = 1
"""The newest version of the protocol that this build speaks; a changed message raises it."""

OLDEST_PROTOCOL = 1
"""The oldest one; it rises to ``PROTOCOL`` when what earlier builds say is no longer understood."""

HOME_FORMAT = 1
"""Of the files below ``~/.potluck``: keys, secrets, member lists."""

CHECKPOINT_FORMAT = 1
"""Of checkpoints."""

UPGRADE = "pip install --upgrade potluck"
"""What a person types to upgrade a machine."""

_RELEASE = re.compile(r"(\d{1,5})\.(\d{1,5})\.(\d{1,5})")
_VERSION = re.compile(r"[0-9][0-9a-z.+]{0,31}")
_PART = 0xFFFF
_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Build:
    """What a process runs: the version of Potluck, and the protocol versions that it speaks."""

    potluck: str
    """For people; empty where it is not known."""
    protocol: int
    oldest: int

    @classmethod
    def announced(cls, potluck: str, protocol: int, oldest: int) -> Build | None:
        """From what is written about a process; None if nothing is known of it.

        >>> Build.announced("0.3.1", 4, 2), Build.announced("", 0, 0)
        (Build(potluck='0.3.1', protocol=4, oldest=2), None)
        >>> Build.announced("see http://evil", 4, 0)
        Build(potluck='', protocol=4, oldest=4)
        """
        if not protocol:
            return None
        text = potluck if _VERSION.fullmatch(potluck) else ""
        return cls(text, protocol, min(oldest or protocol, protocol))

    @classmethod
    def read(cls, number: int, protocol: int, oldest: int) -> Build:
        """From what another process says; builds that say nothing speak version 1.

        >>> Build.read(Build("0.3.1", 4, 2).number, 4, 2)
        Build(potluck='0.3.1', protocol=4, oldest=2)
        >>> Build.read(0, 0, 0)
        Build(potluck='', protocol=1, oldest=1)
        """
        newest = min(max(1, protocol), _MOST)
        parts = (number >> 32) & _PART, (number >> 16) & _PART, number & _PART
        text = ".".join(map(str, parts)) if number else ""
        return cls(text, newest, min(max(1, oldest), newest))

    @property
    def range(self) -> str:
        """The protocol versions in words."""
        if self.oldest == self.protocol:
            return f"protocol {self.protocol}"
        return f"protocols {self.oldest} to {self.protocol}"

    @property
    def number(self) -> int:
        """The version of Potluck in 48 bits, without what follows its third part."""
        found = _RELEASE.match(self.potluck)
        if found is None:
            return 0
        major, minor, patch = (min(int(part), _PART) for part in found.groups())
        return major << 32 | minor << 16 | patch

    def agreed(self, other: Build) -> int | None:
        """The protocol version that two builds speak with each other; None if there is none.

        >>> Build("", 3, 1).agreed(Build("", 2, 2)), Build("", 3, 3).agreed(Build("", 2, 1))
        (2, None)
        """
        common = min(self.protocol, other.protocol)
        return common if common >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        """For sentences.

        >>> str(Build("0.3.1", 4, 2)), str(Build("", 1, 1))
        ('Potluck 0.3.1 (protocols 2 to 4)', 'an unknown version of Potluck (protocol 1)')
        """
        what = f"Potluck {self.potluck}" if self.potluck else "an unknown version of Potluck"
        return f"{what} ({self.range})"


THIS_BUILD = Build(__version__, PROTOCOL, OLDEST_PROTOCOL)
"""What runs here."""


class VersionMismatch(HandshakeRefused):
    """Two machines have no protocol version in common; the text says which one to upgrade.

    >>> error = VersionMismatch("desk", Build("0.3.0", 3, 2), "nas", Build("0.1.0", 1, 1))
    >>> print(error.message)
    desk runs Potluck 0.3.0 (protocols 2 to 3), nas Potluck 0.1.0 (protocol 1): they cannot work ...
    >>> error.hint
    'Upgrade nas: type `pip install --upgrade potluck` there.'
    """

    def __init__(self, here: str, ours: Build, there: str, theirs: Build) -> None:
        self.theirs = theirs
        self.is_ours_older = ours.protocol < theirs.oldest
        older = here if self.is_ours_older else there
        if here == there:
            text, older = f"{here} runs two: {ours}, and {theirs}", "the older one"
        else:
            text = f"{here} runs {ours}, {there} {theirs}"
        super().__init__(
            f"{text}: they cannot work together",
            expected=ours.protocol,
            got=theirs.protocol,
            hint=f"Upgrade {older}: type `{UPGRADE}` there.",
        )


def mixed(builds: Mapping[str, Build]) -> tuple[str, str] | None:
    """Which machines work together in which versions, and what to do; None if all are the same.

    >>> for sentence in mixed({"attic": Build("0.1.0", 1, 1), "desk": Build("0.2.0", 2, 1)}):
    ...     print(sentence)
    attic runs Potluck 0.1.0 (protocol 1), desk Potluck 0.2.0 (protocols 1 to 2)
    They work together; to upgrade attic, type `pip install --upgrade potluck` there.
    """
    if len(set(builds.values())) < 2:  # noqa: PLR2004 - one version is no mixture
        return None
    names: dict[Build, list[str]] = {}
    for name, build in sorted(builds.items()):
        names.setdefault(build, []).append(name)
    order = sorted(names, key=lambda build: (build.protocol, build.number))
    (first, *rest), behind = order, order[:-1]
    parts = [f"{_listed(names[first])} run{'s' * (len(names[first]) == 1)} {first}"]
    parts += [f"{_listed(names[build])} {build}" for build in rest]
    old = _listed([name for build in behind for name in names[build]])
    return ", ".join(parts), f"They work together; to upgrade {old}, type `{UPGRADE}` there."


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


class NewerFile(IoError):
    """A file was written by a later version of Potluck; it is left as it is."""

    def __init__(self, path: object, got: int, expected: int, potluck: str = "") -> None:
        self.potluck = potluck
        by = f"Potluck {potluck}" if _RELEASE.match(potluck) else "a later version of Potluck"
        super().__init__(
            f"{path} was written by {by}, in format {got}; Potluck {__version__} reads up to "
            f"format {expected}",
            expected=expected,
            got=got,
            hint=f"Upgrade Potluck on this machine: `{UPGRADE}`. Nothing was changed.",
        )
