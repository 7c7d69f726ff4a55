"""Why the daemon cannot start: one line for the operator, who can change it. Never travels."""

from __future__ import annotations


class StartError(Exception):
    """The text says what is wrong and which setting to change."""
