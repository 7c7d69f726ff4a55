"""kvpool-master: the command line of the Master.

  kvpool-master [serve] [FLAGS]     run the Master Service
  kvpool-master replay TRACE ...    drive its core with a request trace

Exit codes: 0 stopped on request, or done; 1 could not start (one line on stderr says why); 2 failed while serving.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and not words[0].startswith("-") else "serve"
    if command == "replay":
        from kvpool_master.replay import main as replay_main

        return replay_main(words)
    return _serve(command, words)


def _serve(command: str, words: Sequence[str]) -> int:
    # gRPC's own lines on stderr would stand beside ours; what matters reaches us as an exception.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from kvpool_master.config import ConfigError, load, to_toml
    from kvpool_master.server import refuse, run

    try:
        if command != "serve":
            raise ConfigError(f"unknown command {command!r}: serve or replay")
        loaded = load(words, os.environ)
    except ConfigError as error:
        return refuse(str(error))
    if loaded.print_only:
        print(to_toml(loaded.config), end="")
        return 0
    return run(loaded.config)


if __name__ == "__main__":
    sys.exit(main())
