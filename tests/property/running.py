"""How the machines are run: fixed examples, or with KVPOOL_FUZZ_EXAMPLES=N so many fresh random ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

FUZZ_EXAMPLES = os.environ.get("KVPOOL_FUZZ_EXAMPLES")
TIMEOUT_S = 0 if FUZZ_EXAMPLES else 600


def machine_settings(examples: int) -> settings:
    """Settings of a machine of which so many examples are fixed."""
    return settings(
        max_examples=int(FUZZ_EXAMPLES or examples),
        stateful_step_count=50,
        derandomize=FUZZ_EXAMPLES is None,
        print_blob=FUZZ_EXAMPLES is not None,
        deadline=None,
        phases=[Phase.generate, Phase.reuse, Phase.shrink],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
