"""kvpool-client: the command line of the node client.

  kvpool-client [serve] [FLAGS]     run the node client; --help lists the flags
  kvpool-client sweep [FLAGS]       list segment files; --remove those without a living owner
  kvpool-client --version
  kvpool-client --print-config      the configuration in force, as TOML

Exit codes: 0 stopped on request, or done; 1 could not start (one line on stderr says why); 2 ended by a failure while
serving.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


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
        if command == "sweep":
            return _sweep(words)
        if command != "serve":
            raise StartError(f"unknown command {command!r}: serve, sweep")
        config = load_config([word for word in words if word != "--print-config"])
    except (StartError, BadSegment) as error:
        return refuse(str(error))
    if show:
        print(describe(config))
        return 0
    return run(config)


def _sweep(words: Sequence[str]) -> int:
    """List the segment files of a folder, and remove those of dead owners if told to. Raises StartError."""
    from kvpool_client.config import NodeConfig, Parser
    from kvpool_client.start_error import StartError
    from kvpool_client.sweep import SegmentFile, find, remove

    parser = Parser(prog="kvpool-client sweep", allow_abbrev=False)
    parser.add_argument("--segment-dir", metavar="DIR", default=NodeConfig().segment_dir, help="where segments live")
    parser.add_argument("--remove", action="store_true", help="remove the files without a living owner")
    told = parser.parse_args(words)

    def fate(file: SegmentFile) -> str:
        """Whether it has an owner, or what becomes of it."""
        if file.owned:
            return "alive"
        return "removed" if told.remove and remove(file) else "none"

    try:
        found = find(Path(told.segment_dir))
        rows = [
            (str(file.path), file.node_id, f"{file.length_bytes / (1 << 20):,.0f}", fate(file), str(file.workers))
            for file in found
        ]
    except OSError as error:
        raise StartError(f"segment_dir = {told.segment_dir}: {error.strerror}") from error
    rows.insert(0, ("PATH", "NODE", "MIB", "OWNER", "WORKERS"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
