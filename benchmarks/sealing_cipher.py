"""What sealing costs on one core: GB/s of both ciphers beside a plain copy of the same pieces.

    python benchmarks/sealing_cipher.py [--quick] [--json FILE]

Pieces go the way they go in a transfer: from 16 MiB of memory through a small buffer that stays in
cache and back to memory.  Every repeat times all sizes and cases in turn, so that a busy machine
disturbs them alike; the figures are medians.  FILE may be ``-`` for the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import cryptography
from rich.console import Console
from rich.table import Table

from potluck.net.aead import (
    SECRET_SIZE,
    TAG_SIZE,
    Cipher,
    derive_keys,
    local_speeds,
    preferred_cipher,
    seal_context,
)
from potluck.net.frames import HEADER_SIZE

SIZES = [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20]  # bytes
POOL = 16 << 20  # bytes: several times a core's own cache
TITLES = {Cipher.AES_256_GCM: "AES", Cipher.CHACHA20_POLY1305: "ChaCha"}
COPY = "copy"

Rates = dict[str, float]
"""GB/s of each case."""


class Course:
    """One connection's two ends on one core, and the pieces that pass through them."""

    def __init__(self, plain: memoryview, cipher: Cipher, size: int) -> None:
        secret = bytes(SECRET_SIZE)  # nothing secret passes here
        context = seal_context(connection=b"", epoch=0, initiator="a", responder="b", lane="bench")
        ends = [
            derive_keys(secret, secret, context=context, initiator=side, cipher=cipher)
            for side in (True, False)
        ]
        self.sealer, self.opener = ends[0][0], ends[1][1]
        self.name = TITLES[cipher]
        self.pieces = [plain[start : start + size] for start in range(0, POOL, size)]
        self.buffer = memoryview(bytearray(size + TAG_SIZE))

    def run(self) -> Rates:
        """Seal every piece into the buffer and open it back to where it came from."""
        clock, header, buffer = time.perf_counter, bytes(HEADER_SIZE), self.buffer
        sealing = opening = 0.0
        for piece in self.pieces:
            started = clock()
            self.sealer.seal_into(header, piece, buffer)
            sealed = clock()
            self.opener.open_into(header, buffer, piece)
            sealing += sealed - started
            opening += clock() - sealed
        return {
            f"{self.name} seal": POOL / sealing / 1e9,
            f"{self.name} open": POOL / opening / 1e9,
        }

    def copy(self) -> Rates:
        """Copy every piece into the buffer."""
        buffer = self.buffer[:-TAG_SIZE]
        started = time.perf_counter()
        for piece in self.pieces:
            buffer[:] = piece
        return {COPY: POOL / (time.perf_counter() - started) / 1e9}


def measure(sizes: list[int], repeats: int) -> dict[int, Rates]:
    """Median rates for each piece size."""
    plain = memoryview(bytearray(os.urandom(POOL)))
    courses = {size: [Course(plain, cipher, size) for cipher in Cipher] for size in sizes}
    samples: dict[int, list[Rates]] = {size: [] for size in sizes}
    for repeat in range(repeats + 1):
        for size, (aes, chacha) in courses.items():
            sample = aes.copy() | aes.run() | chacha.run()
            if repeat:  # the first round warms up
                samples[size].append(sample)
    return {
        size: {case: statistics.median(sample[case] for sample in taken) for case in taken[0]}
        for size, taken in samples.items()
    }


def report(sizes: list[int], repeats: int) -> dict[str, Any]:
    """Everything measured, and on what."""
    speeds = local_speeds()
    return {
        "benchmark": "sealing_cipher",
        "unit": "GB/s",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "cryptography": cryptography.__version__,
        "repeats": repeats,
        "preferred_cipher": preferred_cipher().value,
        "quick_measurement_mb_s": {
            Cipher.AES_256_GCM: speeds.aes_256_gcm,
            Cipher.CHACHA20_POLY1305: speeds.chacha20_poly1305,
        },
        "results": [
            {"piece_bytes": size, **rates} for size, rates in measure(sizes, repeats).items()
        ],
    }


def draw(figures: dict[str, Any]) -> Table:
    """The report as a table."""
    table = Table(
        title="Sealing on one core, GB/s",
        caption=f"medians of {figures['repeats']}; preferred here: {figures['preferred_cipher']}",
    )
    names = [name for name in figures["results"][0] if name != "piece_bytes"]
    for title in ("piece", *names, "seal / copy"):
        table.add_column(title, justify="right")
    for row in figures["results"]:
        best = max(row[f"{title} seal"] for title in TITLES.values())
        rates = [f"{row[name]:.2f}" for name in names]
        table.add_row(f"{row['piece_bytes'] >> 10} KiB", *rates, f"{best / row[COPY]:.2f}")
    return table


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three sizes, three repeats")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here; - is stdout")
    options = parser.parse_args()
    figures = report(SIZES[::3] if options.quick else SIZES, 3 if options.quick else 15)
    if options.json == "-":
        json.dump(figures, sys.stdout, indent=2)
        print()
        return
    Console().print(draw(figures))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
