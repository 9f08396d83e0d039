"""The dashboard's own process: told on standard input what to show, and over when that ends."""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from potluck._decode import decode_json
from potluck.apps.dashboard.server import DashboardConfig, open_dashboard
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.cluster.observer import Errand, Outlook
from potluck.errors import DistributedError

LONGEST = 1 << 18
"""Bytes of an errand."""


def main() -> None:
    """Show what is asked for until nobody wants it any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides when it is over
    try:
        errand = decode_json(sys.stdin.buffer.readline(LONGEST), Errand)
        observing = AutoDiscoveryConfig(
            job=errand.job,
            namespace=errand.resolve(),
            peers=errand.peers,
            interfaces=errand.interfaces,
            virtual=errand.virtual,
            multicast=errand.multicast,
            known=errand.known,
        )
        place = DashboardConfig(host=errand.host, port=errand.port)
        served = open_dashboard(observing, place, job=errand.job)
    except (DistributedError, msgspec.DecodeError, OSError, ValueError) as error:
        _answer(Outlook(trouble=str(error)[:1000]))
        return
    with served:
        _answer(Outlook(url=served.url))
        while os.read(sys.stdin.fileno(), 4096):
            pass  # until the pipe ends


def _answer(outlook: Outlook) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(outlook) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
