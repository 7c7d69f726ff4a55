"""What the Master can be told, read once: flags > environment > TOML file > defaults.

Rules
  - One key has three spellings: `drain_ms` in the file, KVPOOL_MASTER_DRAIN_MS, --drain-ms. The core's settings are
    the table [core] of the file, KVPOOL_MASTER_CORE_<NAME> and --core-<name>.
  - The kind of a value follows from the unit in its name: *_ms takes "30s" too, *_bytes* takes "64MiB" too.
  - Unknown keys are refused in all three places, with the nearest known one.
  - Everything wrong raises ConfigError with one line of text.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, cast

from kvpool_master.core.settings import Settings
from kvpool_master.logs import LEVELS
from kvpool_proto.security import Security

ENV_PREFIX = "KVPOOL_MASTER_"
CORE_TABLE = "core"
MESSAGE_BYTES_MIN = 64 << 10
MESSAGE_BYTES_MAX = (1 << 31) - 1
"""gRPC takes a signed 32-bit number."""

# Kubernetes tells every pod of a service called kvpool-master under our prefix; those are not meant for us.
_ENV_OF_KUBERNETES = re.compile(r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_(ADDR|PORT|PROTO))?)?)")

_SIZES = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40} | {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_TIMES = {"": 1, "MS": 1, "S": 1000, "M": 60_000, "H": 3_600_000, "D": 86_400_000}

Kind = Literal["text", "switch", "number", "size", "time"]
Scalar = str | int | bool

_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_EXPECTED: dict[Kind, str] = {
    "text": "a text",
    "switch": "true or false",
    "number": "a whole number",
    "size": 'whole bytes, or a size such as "64MiB"',
    "time": 'whole milliseconds, or a time such as "30s"',
}
_HELP = (
    "The Master Service of kvpool. `kvpool-master [serve]` runs it, `kvpool-master replay` drives its core with a"
    " request trace. Each flag is also a key of the TOML file and a variable KVPOOL_MASTER_<NAME>."
)


class ConfigError(ValueError):
    """The Master cannot start with what it was told; the text is one line for a person."""


def _about(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig:
    """Everything that the Master is told. Raises ConfigError from check()."""

    listen: str = _about("gRPC address, host:port; port 0 takes a free one", "127.0.0.1:50051")
    http: str = _about("address of /metrics, /healthz and /readyz", "127.0.0.1:9500")
    state_dir: str = _about("directory of what outlives the Master; one for each Master", "/var/lib/kvpool")
    plaintext: bool = _about("no TLS: nobody is authenticated, and everything can be read on the way", False)
    tls_ca: str = _about("PEM file of the CA that every peer's certificate must come from", "")
    tls_cert: str = _about("PEM file of the Master's own certificate, and those between it and the CA", "")
    tls_key: str = _about("PEM file of its key", "")
    tls_key_password_file: str = _about("file with the key's password, if it is encrypted", "")
    tls_crl: str = _about("PEM file of the CA's revocation list; peers it names are refused", "")
    tokens_file: str = _about("TOML file of tokens, roles and tenants; without it every peer may do all", "")
    message_bytes_max: int = _about("largest message that is received", 8 << 20)
    rpcs_max: int = _about("RPCs and sessions open at once; more are refused", 16_384)
    tick_ms: int = _about("time between two Ticks of the core", 200)
    drain_ms: int = _about("how long a stop waits for running RPCs", 5_000)
    clear_wait_ms: int = _about("how long a Remove waits for node clients to clear slot headers", 1_000)
    log_level: str = _about("one of " + ", ".join(LEVELS), "info")
    log_json: bool = _about("log lines as JSON", False)
    debug: bool = _about("serve Admin.CheckInvariants, which stops the world for its time", False)
    core: Settings = field(default_factory=Settings)

    @property
    def security(self) -> Security:
        """How the Master is reached; checked when it starts."""
        return Security(
            plaintext=self.plaintext,
            ca=self.tls_ca,
            cert=self.tls_cert,
            key=self.tls_key,
            key_password_file=self.tls_key_password_file,
            crl=self.tls_crl,
        )

    def check(self) -> None:
        """Raise ConfigError, naming the key, unless the Master can start with this."""
        split_address("listen", self.listen)
        split_address("http", self.http)
        if self.log_level not in LEVELS:
            raise ConfigError(f"log_level = {self.log_level!r}: one of {', '.join(LEVELS)}")
        for name, low, high in (
            ("message_bytes_max", MESSAGE_BYTES_MIN, MESSAGE_BYTES_MAX),
            ("rpcs_max", 1, 1 << 20),
            ("tick_ms", 1, 60_000),
            ("drain_ms", 0, 3_600_000),
            ("clear_wait_ms", 0, 60_000),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} = {getattr(self, name)}: {low} to {high}")
        if not self.state_dir:
            raise ConfigError("state_dir is empty")
        if self.tick_ms >= self.core.stall_ms:
            raise ConfigError(f"tick_ms = {self.tick_ms}: below {CORE_TABLE}.stall_ms = {self.core.stall_ms}")
        try:
            self.core.check()
        except ValueError as error:
            raise ConfigError(f"{CORE_TABLE}.{error}") from error


class Loaded(NamedTuple):
    """print_only: show the configuration and leave."""

    config: MasterConfig
    print_only: bool


class _Key(NamedTuple):
    name: str
    kind: Kind
    default: Scalar
    help: str

    @property
    def env(self) -> str:
        """The environment variable of this key."""
        return ENV_PREFIX + self.name.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """The command-line flag of this key."""
        return "--" + re.sub(r"[._]", "-", self.name)


def split_address(name: str, address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises ConfigError, naming the key."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{name} = {address!r}: host:port with a port of 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Loaded:
    """The configuration of this start. Reads the file that --config or KVPOOL_MASTER_CONFIG names.

    Raises ConfigError; SystemExit(0) after --help and --version.
    """
    flags = _parse_flags(argv)
    path = flags.pop("config", None) or environ.get(ENV_PREFIX + "CONFIG")
    print_only = bool(flags.pop("print_config", False))
    values: dict[str, Scalar] = _from_file(Path(str(path))) if path else {}
    values |= _from_environment(environ)
    values |= {name: _parse(name, _KEYS[name].kind, text, _KEYS[name].flag) for name, text in flags.items()}
    config = _build(values)
    config.check()
    return Loaded(config, print_only)


def to_toml(config: MasterConfig) -> str:
    """The configuration as a file that load() would read back."""
    lines = [f"{key.name} = {json.dumps(getattr(config, key.name))}" for key in _KEYS.values() if "." not in key.name]
    lines += ["", f"[{CORE_TABLE}]"]
    lines += [f"{item.name} = {json.dumps(getattr(config.core, item.name))}" for item in fields(Settings)]
    return "\n".join(lines) + "\n"


def _kind_of(name: str, default: Scalar) -> Kind:
    if isinstance(default, bool):
        return "switch"
    if isinstance(default, str):
        return "text"
    if "_per_" in name:
        return "number"
    if name.endswith("_ms"):
        return "time"
    return "size" if "_bytes" in name else "number"


def _all_keys() -> Iterator[_Key]:
    defaults = MasterConfig()
    for item in fields(MasterConfig):
        if item.name != CORE_TABLE:
            default: Scalar = getattr(defaults, item.name)
            yield _Key(item.name, _kind_of(item.name, default), default, item.metadata["help"])
    for item in fields(Settings):
        default = getattr(defaults.core, item.name)
        yield _Key(f"{CORE_TABLE}.{item.name}", _kind_of(item.name, default), default, "see core/settings.py")


_KEYS: dict[str, _Key] = {key.name: key for key in _all_keys()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """What argparse finds wrong becomes a ConfigError."""
        raise ConfigError(message)


def _parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(prog="kvpool-master", allow_abbrev=False, argument_default=argparse.SUPPRESS, description=_HELP)
    parser.add_argument("--version", action="version", version=f"kvpool-master {version()}")
    parser.add_argument("--config", metavar="PATH", help="TOML file; a sample is deploy/config/master.toml")
    parser.add_argument("--print-config", action="store_true", help="print what would be used, as TOML, and exit")
    for key in _KEYS.values():
        text = f"{key.help} (default {key.default})".replace("%", "%%")
        if key.kind == "switch":
            parser.add_argument(key.flag, dest=key.name, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(key.flag, dest=key.name, metavar=key.kind.upper(), help=text)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        raise ConfigError(
            _unknown("flag" if flag.startswith("-") else "argument", flag, [k.flag for k in _KEYS.values()])
        )
    return vars(known)


def version() -> str:
    """The version of the installed distribution."""
    from importlib.metadata import version as installed

    return installed("kvpool")


def _from_file(path: Path) -> dict[str, Scalar]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if name == CORE_TABLE and isinstance(value, dict):
            flat |= {f"{CORE_TABLE}.{inner}": item for inner, item in cast(dict[str, Any], value).items()}
        else:
            flat[name] = value
    for name in flat:
        if name not in _KEYS:
            raise ConfigError(f"{path}: {_unknown('key', name, list(_KEYS))}")
    return {name: _parse(name, _KEYS[name].kind, value, str(path)) for name, value in flat.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Scalar]:
    keys = {key.env: key for key in _KEYS.values()}
    values: dict[str, Scalar] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX) or name == ENV_PREFIX + "CONFIG":
            continue
        if name in keys:
            values[keys[name].name] = _parse(keys[name].name, keys[name].kind, text, name)
        elif not _ENV_OF_KUBERNETES.fullmatch(name.removeprefix(ENV_PREFIX)):
            raise ConfigError("environment: " + _unknown("variable", name, list(keys)))
    return values


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"unknown {what} {name!r}; the nearest known one is {near[0]!r}"


def _build(values: Mapping[str, Scalar]) -> MasterConfig:
    prefix = CORE_TABLE + "."
    core = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    own: dict[str, Any] = {name: value for name, value in values.items() if not name.startswith(prefix)}
    return MasterConfig(core=Settings(**cast(dict[str, Any], core)), **own)


def _parse(name: str, kind: Kind, value: object, where: str) -> Scalar:
    """The value of a key as its kind. value: text, or what TOML made of it."""
    if kind == "text":
        if isinstance(value, str):
            return value
    elif kind == "switch":
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _SWITCHES:
            return _SWITCHES[value.lower()]
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    elif isinstance(value, str) and (number := _number(value, kind)) is not None:
        return number
    raise ConfigError(f"{where}: {name} = {value!r}: {_EXPECTED[kind]}")


def _number(text: str, kind: Kind) -> int | None:
    """The whole number that `text` means in the smallest unit of its kind; None if it means none."""
    match = re.fullmatch(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    units = {"size": _SIZES, "time": _TIMES}.get(kind, {"": 1})
    if match is None or match[2].upper() not in units:
        return None
    exact = Fraction(match[1]) * units[match[2].upper()]
    return int(exact) if exact.denominator == 1 else None
