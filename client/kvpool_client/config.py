"""What the node client can be told, read once: flags > environment > TOML file > defaults.

Rules
  - One setting has three spellings: `slab_bytes` in the file, KVPOOL_CLIENT_SLAB_BYTES, --slab-bytes.
  - *_bytes and *_bytes_max take "64MiB" as well as a number, *_ms takes "5s".
  - Unknown settings are refused in all three places, with the nearest known one.
  - Everything wrong raises StartError, in one line.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import socket
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NoReturn, get_args

from kvpool_client.local_socket import SEGMENTS_MAX
from kvpool_client.logs import LEVELS, Level
from kvpool_client.owned_segment import NODE_ID_PATTERN, SegmentPlan
from kvpool_client.pages import HugePages
from kvpool_client.start_error import StartError
from kvpool_proto.errors import BadSegment
from kvpool_proto.geometry import check_segment
from kvpool_proto.security import Security

ENV_PREFIX: Final = "KVPOOL_CLIENT_"
COUNT_MAX: Final = 1 << 20

_SIZES: Final = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_TIMES: Final = {"": 1, "ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000}
_UNITS: Final = ((("_bytes", "_bytes_max"), _SIZES), ("_ms", _TIMES))
_AMOUNT: Final = re.compile(r"(\d+)\s*([A-Za-z]*)")
# Kubernetes tells pods of a service named kvpool-client under our prefix.
_OF_KUBERNETES: Final = re.compile(r"(service_host|service_port|port)(_.*)?")


def _default_node_id() -> str:
    return socket.gethostname()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Settings of a node client. `help` of a field is what --help says."""

    master: str = field(default="127.0.0.1:50051", metadata={"help": "address of the Master, host:port"})
    node_id: str = field(default_factory=_default_node_id, metadata={"help": "unique in the pool; the host's name"})
    segment_dir: str = field(default="/dev/shm", metadata={"help": "where segments live: tmpfs, hugetlbfs, a folder"})
    segment_bytes: int = field(default=1 << 30, metadata={"help": "DRAM given to the pool, all segments together"})
    segments: int = field(default=1, metadata={"help": "into how many segments that is divided"})
    slab_bytes: int = field(default=64 << 20, metadata={"help": "slab size; a slot has to fit in a slab"})
    huge_pages: HugePages = field(default="off", metadata={"help": "off, try or on"})
    numa_node: tuple[int, ...] = field(
        default=(-1,), metadata={"help": "NUMA node: one for all segments, or one for each (0,1); -1: anywhere"}
    )
    prefault_threads: int = field(default=2, metadata={"help": "threads that touch the memory at start"})
    discard: bool = field(default=False, metadata={"help": "at a stop, retire and remove the segments; else keep"})
    socket_path: str = field(default="/run/kvpool/node.sock", metadata={"help": "Unix socket for local workers"})
    socket_mode: int = field(default=0o660, metadata={"help": 'who may connect, octal: "0660"'})
    allowed_uids: tuple[int, ...] = field(default=(), metadata={"help": "users let in (0,1000); see allowed_gids"})
    allowed_gids: tuple[int, ...] = field(
        default=(), metadata={"help": "groups let in; neither is told: whoever socket_mode lets in"}
    )
    http: str = field(default="127.0.0.1:9501", metadata={"help": "metrics and health, host:port; port 0: any"})
    data_listen: str = field(
        default="127.0.0.1:9502", metadata={"help": "data port for peers, host:port; port 0: any; empty: none"}
    )
    data_advertise: str = field(
        default="", metadata={"help": "host:port at which peers reach the data port; empty: as data_listen"}
    )
    data_connections_max: int = field(default=256, metadata={"help": "connections of peers at a time"})
    data_io_timeout_ms: int = field(default=5_000, metadata={"help": "longest time a peer may move no byte"})
    copy_bytes_max: int = field(default=64 << 20, metadata={"help": "memory for copies that come from peers"})
    workers_max: int = field(default=1024, metadata={"help": "workers attached at a time"})
    connections_max: int = field(default=256, metadata={"help": "connections on the Unix socket at a time"})
    local_timeout_ms: int = field(default=5_000, metadata={"help": "time for one request on the Unix socket"})
    plaintext: bool = field(default=False, metadata={"help": "no TLS: nobody is authenticated, all can be read"})
    tls_ca: str = field(default="", metadata={"help": "PEM file of the CA that Master and peers must come from"})
    tls_cert: str = field(default="", metadata={"help": "PEM file of this node's certificate"})
    tls_key: str = field(default="", metadata={"help": "PEM file of its key"})
    tls_key_password_file: str = field(default="", metadata={"help": "file with the key's password, if encrypted"})
    tls_crl: str = field(default="", metadata={"help": "PEM file of the CA's revocation list"})
    token_file: str = field(default="", metadata={"help": "file with the token that the Master knows this node by"})
    data_plaintext: bool = field(default=False, metadata={"help": "the data port without TLS: capabilities only"})
    rpc_timeout_ms: int = field(default=3_000, metadata={"help": "deadline of a call to the Master"})
    backoff_max_ms: int = field(default=5_000, metadata={"help": "longest pause before the Master is tried again"})
    ready_wait_ms: int = field(default=5_000, metadata={"help": "how long the start waits for the Master"})
    log_level: Level = field(default="info", metadata={"help": "debug, info, warning or error"})
    log_json: bool = field(default=False, metadata={"help": "log lines as JSON"})

    @property
    def security(self) -> Security:
        """How Master and peers are reached; checked at start."""
        return Security(
            plaintext=self.plaintext,
            ca=self.tls_ca,
            cert=self.tls_cert,
            key=self.tls_key,
            key_password_file=self.tls_key_password_file,
            crl=self.tls_crl,
            token_file=self.token_file,
            data_plaintext=self.data_plaintext,
        )

    def check(self) -> None:
        """Raise StartError, naming the setting, or BadSegment unless a node client can run with this."""
        for name in ("master", "http"):
            split_address(name, getattr(self, name))
        for name in ("data_listen", "data_advertise"):
            if getattr(self, name):
                split_address(name, getattr(self, name))
        if not NODE_ID_PATTERN.fullmatch(self.node_id):
            raise StartError(f"node_id = {self.node_id!r}: letters, digits, '.', '_' and '-', at most 128")
        for name, low, high in (
            ("segments", 1, SEGMENTS_MAX),
            ("prefault_threads", 1, 256),
            ("data_connections_max", 1, COUNT_MAX),
            ("data_io_timeout_ms", 1, 600_000),
            ("copy_bytes_max", 64 << 10, 64 << 30),
            ("workers_max", 1, COUNT_MAX),
            ("connections_max", 1, COUNT_MAX),
            ("local_timeout_ms", 1, 600_000),
            ("rpc_timeout_ms", 1, 600_000),
            ("backoff_max_ms", 1, 600_000),
            ("ready_wait_ms", 0, 600_000),
            ("socket_mode", 0o600, 0o777),
        ):
            if not low <= getattr(self, name) <= high:
                raise StartError(f"{name} = {getattr(self, name)}: {low} to {high}")
        for name, choices in (("huge_pages", get_args(HugePages)), ("log_level", LEVELS)):
            if getattr(self, name) not in choices:
                raise StartError(f"{name} = {getattr(self, name)!r}: one of {', '.join(choices)}")
        if len(self.numa_node) not in (1, self.segments) or not all(-1 <= node < 1024 for node in self.numa_node):
            raise StartError(
                f"numa_node = {self.numa_node}: one node for all {self.segments} segments, or one for each"
            )
        if self.segment_bytes % self.segments:
            raise BadSegment(f"segment_bytes = {self.segment_bytes}: not divisible into {self.segments} segments")
        check_segment(self.segment_bytes // self.segments, self.slab_bytes)

    def plans(self) -> list[SegmentPlan]:
        """The segments to adopt or create."""
        nodes = self.numa_node * (self.segments if len(self.numa_node) == 1 else 1)
        return [
            SegmentPlan(
                directory=Path(self.segment_dir),
                node_id=self.node_id,
                index=index,
                size_bytes=self.segment_bytes // self.segments,
                slab_bytes=self.slab_bytes,
                huge_pages=self.huge_pages,
                numa_node=numa_node,
            )
            for index, numa_node in enumerate(nodes)
        ]


def load_config(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> NodeConfig:
    """The configuration from flags, environment and the file that either of them names, checked.

    Raises StartError, BadSegment; SystemExit for --help.
    """
    flags = _read_flags(argv)
    variables = _read_environment(environ)
    named = [told.pop("config", None) for told in (flags, variables)]
    path = named[0] or named[1]
    told = (_read_file(Path(path)) if path else {}) | variables | flags
    config = NodeConfig(**{name: _parse(name, value) for name, value in told.items()})
    config.check()
    return config


def describe(config: NodeConfig) -> str:
    """The configuration as a TOML file that says the same."""
    lines: list[str] = []
    for item in fields(config):
        value: Any = getattr(config, item.name)
        if isinstance(value, bool):
            text = str(value).lower()
        elif item.name == "socket_mode":
            text = f'"{value:04o}"'
        elif item.type == "tuple[int, ...]":
            text = str(list(value))
        else:
            text = str(value) if isinstance(value, int) else f'"{value}"'
        lines.append(f"{item.name} = {text}")
    return "\n".join(lines)


def split_address(name: str, address: str) -> tuple[str, int]:
    """host:port as a pair; [::1]:80 as well. Raises StartError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise StartError(f"{name} = {address!r}: host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Parser(argparse.ArgumentParser):
    """For flags of this program."""

    def error(self, message: str) -> NoReturn:
        """What argparse finds wrong becomes a StartError."""
        raise StartError(message)


def _read_flags(argv: Sequence[str]) -> dict[str, str]:
    parser = Parser(prog="kvpool-client serve", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with the settings below, - as _")
    for item in fields(NodeConfig):
        flag = "--" + item.name.replace("_", "-")
        if item.type == "bool":
            parser.add_argument(flag, nargs="?", const="true", help=item.metadata["help"])
        else:
            parser.add_argument(flag, metavar=item.name.rpartition("_")[2].upper(), help=item.metadata["help"])
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].removeprefix("--").partition("=")[0].replace("-", "_")
        raise StartError(f"unknown argument {unknown[0]}{_nearest(name, '--', '-')}")
    return vars(known)


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX):
            name = variable.removeprefix(ENV_PREFIX).lower()
            if _OF_KUBERNETES.fullmatch(name):
                continue
            if name != "config" and name not in _names():
                raise StartError(f"unknown variable {variable}{_nearest(name, ENV_PREFIX, '_', upper=True)}")
            found[name] = value
    return found


def _read_file(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartError(f"{path}: {error}") from error
    for name in found:
        if name not in _names():
            raise StartError(f"{path}: unknown setting {name}{_nearest(name, '', '_')}")
    return found


def _names() -> list[str]:
    return [item.name for item in fields(NodeConfig)]


def _nearest(name: str, prefix: str, joint: str, *, upper: bool = False) -> str:
    near = difflib.get_close_matches(name, _names(), n=1, cutoff=0.5)
    if not near:
        return ""
    spelled = near[0].replace("_", joint)
    return f"; did you mean {prefix}{spelled.upper() if upper else spelled}?"


def _parse(name: str, value: Any) -> Any:
    """One setting from a flag's or variable's text, or from TOML."""
    kind = next(item.type for item in fields(NodeConfig) if item.name == name)
    try:
        if kind == "bool":
            return _switch(value)
        if kind == "tuple[int, ...]":
            parts = str(value).strip("[]")  # a list of TOML, or a text
            return tuple(int(part) for part in parts.split(",")) if parts else ()
        if name == "socket_mode":
            return int(value, 8) if isinstance(value, str) else _whole(value, {"": 1})
        if kind == "int":
            return _whole(value, next((units for ends, units in _UNITS if name.endswith(ends)), {"": 1}))
        if not isinstance(value, str):
            raise ValueError("a string")
    except (TypeError, ValueError) as error:
        raise StartError(f"{name} = {value!r}: {error}") from None
    return value


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("true", "false"):
        raise ValueError("true or false")
    return value == "true"


def _whole(value: Any, units: Mapping[str, int]) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[2].lower() not in units:
        raise ValueError("a whole number" + (f", or one with {', '.join(u for u in units if u)}" if units[""] else ""))
    return int(found[1]) * units[found[2].lower()]
