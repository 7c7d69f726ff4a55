"""Commands and outcomes on one line, for the list that a failure prints."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, cast

from kvpool_master.core.extents import extents


def shown(value: object) -> str:
    """A value for people: defaults left out, extents unpacked, keys and ids in hex without leading zeros."""
    if isinstance(value, bytes):
        return value.hex().lstrip("0") or "0"
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        defaults: dict[str, Any] = {item.name: item.default for item in fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        named = cast(Any, value)
        defaults = {name: named._field_defaults.get(name, MISSING) for name in named._fields}
    elif isinstance(value, tuple):
        return f"[{', '.join([shown(item) for item in cast(tuple[object, ...], value)])}]"
    else:
        return repr(value)
    items: list[str] = []
    for name, default in defaults.items():
        inner = getattr(value, name)
        if name == "extents":
            inner = tuple(tuple(run) for run in extents(inner))
        if inner != default and inner not in (b"", ()):
            items.append(f"{name}={shown(inner)}")
    return f"{type(value).__name__}({', '.join(items)})"
