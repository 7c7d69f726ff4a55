"""What outlives the Master: a few facts in an SQLite file of its state directory.

Rules
  - What a method wrote is on the disk when it returns: the answer to a command may depend on it.
  - The file belongs to one process at a time; a second Master on the directory is refused.
  - A file of a former schema is brought to ours when it is opened, all at once.
  - The epoch only rises, and each start has one of its own, whatever the wall clock says.
  - grace_ms is how long something granted may outlive the Master: the longest times of its settings from its start on,
    or what a former life left if that is more; what is really left after a clean stop.
  - Everything that goes wrong raises StateError with one line of text. The file is then in doubt: who writes no more
    must answer no more.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvpool_master.core.effects import Remember
from kvpool_master.core.memory import Memory
from kvpool_master.core.settings import Settings
from kvpool_proto.namespace import NamespaceSpec

FILE: Final = "kvpool-master.db"
EPOCH_MAX: Final = (1 << 32) - 1
"""Stamps carry the epoch in their upper 32 bits."""
STAMP_BYTES: Final = 8
BYPASS_BITS: Final = {"lookups": 1, "loads": 2, "stores": 4}
"""What the switch turns off; the bits are those of the word in the superblocks."""

_APPLICATION_ID: Final = 0x6B76706D
_SCHEMA: Final = 2
_TABLES_OF_1: Final = (
    "CREATE TABLE master (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, grace_ms INTEGER NOT NULL,"
    " bypass INTEGER NOT NULL)",
    "CREATE TABLE namespaces (id BLOB PRIMARY KEY, spec TEXT NOT NULL)",
    # A stamp as big-endian bytes: SQLite's integers have a sign, and bytes of one length compare as numbers do.
    "CREATE TABLE tombstones (namespace BLOB PRIMARY KEY, stamp BLOB NOT NULL)",
    "CREATE TABLE nodes (name TEXT PRIMARY KEY)",
)
_TABLES_OF_2: Final = (
    # Not a column of nodes: one that is given up and comes again drains as before.
    "CREATE TABLE draining (name TEXT PRIMARY KEY)",
    "CREATE TABLE quotas (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL)",
)


class StateError(Exception):
    """The state directory cannot be used; the text is one line for a person."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a life of the Master begins with. bypass: of BYPASS_BITS."""

    epoch: int
    memory: Memory
    bypass: int


class State:
    """The open file. Used by one thread at a time."""

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        self._directory = directory
        self._connection = connection
        self._nodes: set[str] = set()

    @classmethod
    def open(cls, directory: str) -> State:
        """Take the file of the directory, which is made if need be. Raises StateError."""
        folder = Path(directory)
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True)
                _sync(folder.parent)
            connection = sqlite3.connect(
                folder / FILE, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=16
            )
        except (OSError, sqlite3.Error) as error:
            raise _failure(folder, error) from error
        state = cls(folder, connection)
        try:
            state._prepare()
        except StateError:
            connection.close()
            raise
        return state

    def begin(self, wall_s: float, settings: Settings) -> Start:
        """The next life: its epoch, above all former ones, and what it must know of them. Raises StateError."""
        with self._transaction() as db:
            known = db.execute("SELECT epoch, grace_ms, bypass FROM master").fetchone()
            former_epoch, grace_ms, bypass = known or (0, None, 0)
            epoch = max(former_epoch + 1, int(wall_s))
            longest_ms = max(settings.lease_max_ms, settings.write_max_ms, grace_ms or 0)
            self._put_epoch(epoch)
            db.execute("INSERT OR REPLACE INTO master VALUES (1, ?, ?, ?)", (epoch, longest_ms, bypass))
            return Start(epoch, self._memory(grace_ms), bypass)

    def raise_epoch(self, above: int) -> Start:
        """Another life at once, under an epoch above `above`, and after all graces. Raises StateError."""
        with self._transaction() as db:
            epoch, grace_ms, bypass = db.execute("SELECT epoch, grace_ms, bypass FROM master").fetchone()
            epoch = max(epoch, above) + 1
            self._put_epoch(epoch)
            db.execute("UPDATE master SET epoch = ?", (epoch,))
            return Start(epoch, self._memory(grace_ms), bypass)

    def remember(self, effects: Sequence[Remember]) -> None:
        """Write what the core must know after a restart. Raises StateError."""
        if all(effect.node in self._nodes for effect in effects):
            return  # nodes that come again
        with self._transaction() as db:
            for effect in effects:
                _put(db, effect)
        for effect in effects:
            self._nodes.discard(effect.node_gone)
            if effect.node:
                self._nodes.add(effect.node)

    def set_bypass(self, bits: int) -> None:
        """Write the switch. Raises StateError."""
        with self._transaction() as db:
            db.execute("UPDATE master SET bypass = ?", (bits,))

    def end(self, grace_ms: int) -> None:
        """A clean stop, after which something granted lives for grace_ms at most. Raises StateError."""
        with self._transaction() as db:
            db.execute("UPDATE master SET grace_ms = ?", (grace_ms,))

    def close(self) -> None:
        """Let the file go. What was not written stays so."""
        with suppress(sqlite3.Error):
            self._connection.close()

    def _prepare(self) -> None:
        """Lock the file for good, make or check its tables. Raises StateError."""
        try:
            # Before the first access, so that no shared memory file is made and the lock is kept.
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                self._connection.execute(f"PRAGMA {pragma}")
            with self._transaction() as db:
                version = _pragma(db, "user_version")
                if not version and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    self._make(_TABLES_OF_1 + _TABLES_OF_2)
                elif _pragma(db, "application_id") != _APPLICATION_ID:
                    raise self._doubt("belongs to another program")
                elif version not in (1, _SCHEMA):
                    raise self._doubt(f"has version {version} of the schema; this Master knows {_SCHEMA}")
                elif _pragma(db, "quick_check") != "ok":
                    raise self._doubt("is damaged")
                elif version == 1:
                    self._make(_TABLES_OF_2)
                self._nodes = set(self._memory(None).nodes)
            _sync(self._directory)
        except (OSError, sqlite3.Error) as error:
            raise _failure(self._directory, error) from error

    def _make(self, tables: Sequence[str]) -> None:
        """Tables that lack to our schema."""
        for table in tables:
            self._connection.execute(table)
        self._connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        self._connection.execute(f"PRAGMA user_version = {_SCHEMA}")

    def _memory(self, grace_ms: int | None) -> Memory:
        db = self._connection
        try:
            specs = [NamespaceSpec(**json.loads(row[0])) for row in db.execute("SELECT spec FROM namespaces")]
        except (TypeError, ValueError) as error:
            raise self._doubt(f"is damaged ({error})") from error
        tombstones = [(ident, int.from_bytes(stamp, "big")) for ident, stamp in db.execute("SELECT * FROM tombstones")]
        nodes = [name for (name,) in db.execute("SELECT name FROM nodes ORDER BY name")]
        draining = [name for (name,) in db.execute("SELECT name FROM draining ORDER BY name")]
        quotas = db.execute("SELECT tenant, bytes FROM quotas ORDER BY tenant").fetchall()
        return Memory(tuple(specs), tuple(tombstones), tuple(nodes), grace_ms, tuple(draining), tuple(quotas))

    def _put_epoch(self, epoch: int) -> None:
        if epoch > EPOCH_MAX:
            raise StateError(f"state_dir = {self._directory}: the next epoch would be {epoch}: above {EPOCH_MAX}")

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        """All or nothing, and on the disk at the end. Raises StateError."""
        db = self._connection
        try:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except BaseException as error:
            with suppress(sqlite3.Error):
                db.rollback()
            if isinstance(error, sqlite3.Error):
                raise _failure(self._directory, error) from error
            raise

    def _doubt(self, text: str) -> StateError:
        return StateError(f"state_dir = {self._directory}: {FILE} {text}; without it, former purges are forgotten")


def _put(db: sqlite3.Connection, effect: Remember) -> None:
    if effect.namespace is not None:
        spec = json.dumps(asdict(effect.namespace), sort_keys=True)
        db.execute("INSERT OR REPLACE INTO namespaces VALUES (?, ?)", (effect.namespace.id, spec))
    if effect.tombstone is not None:
        namespace, stamp = effect.tombstone
        db.execute(
            "INSERT INTO tombstones VALUES (?, ?) ON CONFLICT DO UPDATE SET stamp = max(stamp, excluded.stamp)",
            (namespace, stamp.to_bytes(STAMP_BYTES, "big")),
        )
    if effect.node:
        db.execute("INSERT OR IGNORE INTO nodes VALUES (?)", (effect.node,))
    if effect.node_gone:
        db.execute("DELETE FROM nodes WHERE name = ?", (effect.node_gone,))
    if effect.draining is not None:
        name, drains = effect.draining
        statement = "INSERT OR IGNORE INTO draining VALUES (?)" if drains else "DELETE FROM draining WHERE name = ?"
        db.execute(statement, (name,))
    if effect.quota is not None:
        tenant, limit_bytes = effect.quota
        if limit_bytes:
            db.execute("INSERT OR REPLACE INTO quotas VALUES (?, ?)", (tenant, limit_bytes))
        else:
            db.execute("DELETE FROM quotas WHERE tenant = ?", (tenant,))


def _pragma(db: sqlite3.Connection, name: str) -> int | str:
    return db.execute(f"PRAGMA {name}").fetchone()[0]


def _sync(folder: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _failure(folder: Path, error: OSError | sqlite3.Error) -> StateError:
    if isinstance(error, OSError):
        text = error.strerror or str(error)
    elif getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        text = f"another Master uses {FILE}"
    else:
        text = f"{FILE}: {error}"
    return StateError(f"state_dir = {folder}: {text}")
