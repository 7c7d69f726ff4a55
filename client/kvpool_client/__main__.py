"""kvpool-client: the command line of the node client.

  kvpool-client [serve] [FLAGS]     run the node client; --help lists the flags
  kvpool-client --version
  kvpool-client --print-config      the configuration in force, as TOML

Exit codes: 0 stopped on request; 1 could not start (one line on stderr says why); 2 ended by a failure while serving.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and not words[0].startswith("-") else "serve"
    if words == ["--version"]:
        print(version("kvpool"))
        return 0
    # gRPC's own lines on stderr would stand beside ours; what matters reaches us as an exception.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from kvpool_client.config import describe, load_config
        from kvpool_client.daemon import refuse, run
    except ModuleNotFoundError as error:
        print(f'kvpool-client: {error.name} is missing: pip install "kvpool[daemon]"', file=sys.stderr)
        return 1
    from kvpool_client.start_error import StartError
    from kvpool_proto.errors import BadSegment

    show = "--print-config" in words
    try:
        if command != "serve":
            raise StartError(f"unknown command {command!r}: serve")
        config = load_config([word for word in words if word != "--print-config"])
    except (StartError, BadSegment) as error:
        return refuse(str(error))
    if show:
        print(describe(config))
        return 0
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
