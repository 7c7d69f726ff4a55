"""The bypass switch: lookups, loads or stores turned off without a restart of the engine.

Rules
  - Off is what the environment (KVPOOL_BYPASS, read once at connect) or the node client says; the node client has it
    from the Master and writes it into a word of every superblock, where workers read it at each call.
  - A call that is off answers "bypassed" at once: no request, no copy, no look at the caller's buffers. Leases are
    still released, and peek still answers: it is an operator's question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BYPASS_LOOKUPS: Final = 1
BYPASS_LOADS: Final = 2
BYPASS_STORES: Final = 4

VARIABLE: Final = "KVPOOL_BYPASS"
REASON: Final = "bypassed"
_WORDS: Final = {
    "lookups": BYPASS_LOOKUPS,
    "loads": BYPASS_LOADS,
    "stores": BYPASS_STORES,
    "all": BYPASS_LOOKUPS | BYPASS_LOADS | BYPASS_STORES,
}


def from_environment(environment: Mapping[str, str]) -> int:
    """The calls that KVPOOL_BYPASS turns off, BYPASS_ bits: words with commas between. Raises ValueError for others."""
    bits = 0
    for word in environment.get(VARIABLE, "").split(","):
        name = word.strip().lower()
        if name and name not in _WORDS:
            raise ValueError(f"{VARIABLE}: {name!r} is none of {', '.join(_WORDS)}")
        bits |= _WORDS.get(name, 0)
    return bits
