"""One figure of the benchmark, the table, and the JSON file."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """A figure with its unit and, where there is one, its target. ok: None without a target."""

    name: str
    value: float
    unit: str
    target: str
    ok: bool | None


def row(name: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None) -> Row:
    """A figure, judged by its target."""
    if at_least is not None:
        return Row(name, value, unit, f">= {at_least:g}", value >= at_least)
    if at_most is not None:
        return Row(name, value, unit, f"<= {at_most:g}", value <= at_most)
    return Row(name, value, unit, "", None)


def processor() -> str:
    """The processor's name as Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    """What the figures were measured on."""
    return f"{os.cpu_count()} x {processor()}, Linux {platform.release()}, Python {platform.python_version()}"


def show(rows: list[Row]) -> str:
    """The rows as a table."""
    width = max(len(one.name) for one in rows)
    lines: list[str] = []
    for one in rows:
        mark = {None: "", True: "ok", False: "MISSED"}[one.ok]
        lines.append(f"{one.name:<{width}}  {one.value:>12,.2f} {one.unit:<9} {one.target:<9} {mark}".rstrip())
    return "\n".join(lines)


def write(rows: list[Row], path: Path) -> None:
    """The rows and the machine as JSON."""
    path.write_text(json.dumps({"machine": machine(), "rows": [asdict(one) for one in rows]}, indent=1) + "\n")
