"""What the demo shows: progress while it works, one row per request, totals. Results on stdout, progress on stderr.

Rules
  - On a terminal progress is one line that is written over; in a log it is a plain line now and then.
  - Nothing is wider than WIDTH columns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 104
PLAIN_PAUSE_S: Final = 10.0

HEAD: Final = (
    f"  {'request':<24}{'prompt':>8}{'from HBM':>10}{'from pool':>11}{'computed':>10}"
    f"{'first token':>13}{'without pool':>14}{'':>8}"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One request with the pool, beside the same one without it. Lengths in tokens; pool_s: to look up and load."""

    scene: str
    name: str
    prompt: int
    hbm: int
    pool: int
    ttft_s: float
    reference_ttft_s: float
    pool_s: float
    pool_bytes: int
    same_tokens: bool
    text: str

    @property
    def computed(self) -> int:
        """Prompt tokens that the model had to run."""
        return self.prompt - self.hbm - self.pool

    @property
    def faster(self) -> float:
        """How many times sooner the first token came."""
        return self.reference_ttft_s / self.ttft_s

    @property
    def label(self) -> str:
        """Scene and name."""
        return f"{self.scene}: {self.name}"

    def answer(self) -> str:
        """What the model said, its first line."""
        return f"  {self.label:<24}{self.text.strip().splitlines()[0][: WIDTH - 26] if self.text.strip() else ''}"

    def line(self) -> str:
        """The row as it is printed."""
        verdict = "" if self.same_tokens else "  TOKENS DIFFER"
        return (
            f"  {self.label:<24}{self.prompt:>8,}{self.hbm:>10,}{self.pool:>11,}{self.computed:>10,}"
            f"{f'{self.ttft_s:.2f} s':>13}{f'{self.reference_ttft_s:.2f} s':>14}{f'{self.faster:.1f} x':>8}{verdict}"
        )


class Screen:
    """Writes results, and progress that never stands between them."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._shown = False
        self._next_plain_s = 0.0

    def say(self, line: str = "") -> None:
        """A lasting line."""
        self._wipe()
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def tick(self, text: str) -> None:
        """What goes on at this moment."""
        if self._tty:
            sys.stderr.write(f"\r\x1b[K  {text[: WIDTH - 2]}")
            self._shown = True
        elif time.monotonic() >= self._next_plain_s:
            sys.stderr.write(f"  ... {text}\n")
            self._next_plain_s = time.monotonic() + PLAIN_PAUSE_S
        sys.stderr.flush()

    def _wipe(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


def bar(done: int, total: int, width: int = 24) -> str:
    """A progress bar."""
    full = width * done // total
    return f"[{'#' * full}{'.' * (width - full)}]"


def totals(title: str, rows: Sequence[Row]) -> list[str]:
    """Tokens by source, what the pool moved, and the time to first token of all rows together."""
    prompt = sum(row.prompt for row in rows)
    parts = {
        "HBM": sum(row.hbm for row in rows),
        "the pool": sum(row.pool for row in rows),
        "computed": sum(row.computed for row in rows),
    }
    shares = ", ".join(f"{name} {tokens:,} ({tokens / prompt:.0%})" for name, tokens in parts.items())
    with_pool, without = sum(row.ttft_s for row in rows), sum(row.reference_ttft_s for row in rows)
    loaded, seconds = sum(row.pool_bytes for row in rows), sum(row.pool_s for row in rows)
    indent = " " * len(title)
    return [
        f"  {title}: {prompt:,} prompt tokens: {shares}",
        f"  {indent}  from the pool {loaded / 1e6:,.0f} MB in {seconds:.2f} s, lookups and checksums included",
        f"  {indent}  waited for first tokens {with_pool:.1f} s, without the pool {without:.1f} s",
    ]
