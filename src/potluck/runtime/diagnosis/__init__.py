"""Why nodes do not meet: what can be seen from this machine, and what follows from it.

:mod:`~potluck.runtime.diagnosis.look` gathers a :class:`~potluck.runtime.diagnosis.scene.Scene`
once; every check is a file with a function that turns a scene into findings, without touching the
network again.  A new check is a new file, and a line in ``CHECKS``.
"""

from potluck.runtime.diagnosis.checks import CHECKS, diagnose
from potluck.runtime.diagnosis.finding import Finding, Severity

__all__ = ["CHECKS", "Finding", "Severity", "diagnose"]
