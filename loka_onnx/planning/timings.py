"""The database of kernel times, and the shipped records.

One SQLite file in WAL mode: any number of processes may read while one writes, and writers wait for one
another (https://sqlite.org/wal.html). WAL needs shared memory, so all of them are on one machine; between
machines times travel as JSON (`TimingRecords`). Of several times of one kernel on one shape the last one
counts.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from loka_onnx.core import serde
from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.timing import Kernel, KernelTiming, Provenance, Shape, TimingRecords
from loka_onnx.errors import OutputError, UserError

SCHEMA_VERSION = 1
"""`PRAGMA user_version` of a database."""
APPLICATION_ID = 0x4C4F4B41
"""`PRAGMA application_id` of a database: "LOKA" in ASCII."""
WAIT_SECONDS = 60.0
"""Time limit of a writer's wait for others."""

_TABLES = (
    "CREATE TABLE provenances (id INTEGER PRIMARY KEY, document TEXT NOT NULL UNIQUE)",
    """CREATE TABLE timings (
        device TEXT NOT NULL, backend TEXT NOT NULL, name TEXT NOT NULL, precision TEXT NOT NULL,
        scales TEXT NOT NULL, fused_quantize TEXT NOT NULL,
        m INTEGER NOT NULL, n INTEGER NOT NULL, k INTEGER NOT NULL,
        us REAL NOT NULL, spread_us REAL, repeats INTEGER NOT NULL, error REAL,
        provenance INTEGER NOT NULL REFERENCES provenances (id),
        PRIMARY KEY (device, backend, name, precision, scales, fused_quantize, m, n, k)
    ) WITHOUT ROWID""",
)
_KEY = ("device", "backend", "name", "precision", "scales", "fused_quantize", "m", "n", "k")
_COLUMNS = (*_KEY, "us", "spread_us", "repeats", "error")


class TimingDatabase:
    """A file of kernel times, created when missing; use it as a context manager.

    UserError if the file is no such database or of another version, OutputError if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with OutputError(f"E0709 cannot open the timing database '{path}'").in_place_of(
            OSError, sqlite3.Error
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            # No implicit transactions: they are explicit below.
            self._connection = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None)
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def add(self, timings: Iterable[KernelTiming]) -> None:
        """Write times, all of them or none; raises OutputError if the file cannot be written."""
        with self._transaction() as connection:
            for timing in tuple(timings):
                shape, measured = timing.shape, (timing.us, timing.spread_us, timing.repeats, timing.error)
                source = json.dumps(serde.to_plain(timing.provenance), sort_keys=True)
                connection.execute("INSERT OR IGNORE INTO provenances (document) VALUES (?)", (source,))
                connection.execute(
                    f"INSERT OR REPLACE INTO timings ({', '.join(_COLUMNS)}, provenance) "
                    f"VALUES ({', '.join('?' * len(_COLUMNS))}, "
                    "(SELECT id FROM provenances WHERE document = ?))",
                    (*timing.kernel.key, shape.m, shape.n, shape.k, *measured, source),
                )

    def read(self, device: str | None = None) -> tuple[KernelTiming, ...]:
        """Return times by kernel and shape, of one device or of all; UserError if a row is not understood."""
        where, values = ("", ()) if device is None else (" WHERE device = ?", (device,))
        rows = self._connection.execute(
            f"SELECT {', '.join(_COLUMNS)}, document FROM timings "
            f"JOIN provenances ON provenances.id = timings.provenance{where} ORDER BY {', '.join(_KEY)}",
            values,
        )
        unknown = UserError(
            "E0710 the timing database holds what this version of loka-onnx does not know",
            where=str(self.path),
            remedy="export it with the version that wrote it, or measure again into another file",
        )
        with unknown.in_place_of(ValueError, TypeError):
            return tuple(_timing(row) for row in rows)

    def missing(
        self, wanted: Iterable[tuple[Kernel, Shape]], device_name: str | None = None
    ) -> tuple[tuple[Kernel, Shape], ...]:
        """Return the wanted kernels on shapes without a known time, in their order.

        `device_name` is the device as its driver names it: a time of another one (an H100 of another form
        factor) does not count. None for any.
        """
        known = {
            (timing.kernel, timing.shape)
            for timing in self.read()
            if device_name in (None, timing.provenance.device_name)
        }
        return tuple(each for each in wanted if each not in known)

    def export(self, path: Path) -> int:
        """Write every time as JSON (`TimingRecords`); return their number. OutputError if that fails."""
        timings = self.read()
        serde.write(TimingRecords.of(timings), path)
        return len(timings)

    def take(self, path: Path) -> int:
        """Add every time of a JSON file (`TimingRecords`); return their number. UserError if it is none."""
        timings = read_records(path)
        self.add(timings)
        return len(timings)

    def _prepare(self) -> None:
        try:
            # The tables first: another process may create tables and numbers, atomically, just now.
            tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            marks = self._pragma("application_id"), self._pragma("user_version")
        except sqlite3.DatabaseError as error:
            raise self._foreign(str(error)) from error
        if tables and marks != (APPLICATION_ID, SCHEMA_VERSION):
            if marks[0] != APPLICATION_ID:
                raise self._foreign(f"its application id is {marks[0]:#x}, not {APPLICATION_ID:#x}")
            raise UserError(
                "E0711 the timing database is of another version",
                where=str(self.path),
                evidence=f"its version is {marks[1]}, this loka-onnx reads {SCHEMA_VERSION}",
                remedy="measure again into another file",
            )
        with OutputError(f"E0712 cannot write the timing database '{self.path}'").in_place_of(sqlite3.Error):
            self._connection.execute("PRAGMA foreign_keys = ON")
            self._write_ahead()
            if not tables:
                self._create()

    def _write_ahead(self) -> None:
        """Switch to WAL; SQLite does not wait by itself where two processes do so at the same moment."""
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
            else:
                return

    def _create(self) -> None:
        with self._transaction() as connection:
            # Another process may have been here since the check in `_prepare`.
            if self._pragma("user_version") == 0:
                for statement in _TABLES:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with OutputError(f"E0713 cannot write the timing database '{self.path}'").in_place_of(sqlite3.Error):
            # The write lock at once: a transaction that reads first may find the file changed when it writes.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _foreign(self, evidence: str) -> UserError:
        return UserError(
            "E0714 not a timing database",
            where=str(self.path),
            evidence=evidence,
            remedy="give the file that `loka-onnx tune` wrote, or one that does not exist yet",
        )


def read_records(path: Path) -> tuple[KernelTiming, ...]:
    """Return the times of a JSON file; raises UserError if the file is missing or is not such a document."""
    with UserError("E0715 the file holds an impossible time", where=str(path)).in_place_of(ValueError):
        return serde.read(TimingRecords, path).timings


def shipped_timings(device: str) -> tuple[KernelTiming, ...]:
    """Return the times of a device that come with this package; none where there are none."""
    resource = files("loka_onnx.planning") / "records" / f"{device}.json"
    if not resource.is_file():
        return ()
    text = resource.read_text(encoding="utf-8")
    return serde.loads(TimingRecords, text, where=f"shipped records of {device}").timings


def known_timings(device: str, databases: Sequence[Path]) -> tuple[KernelTiming, ...]:
    """Return every time of a device, shipped ones first; the last one counts, a missing file is empty."""
    timings = {(timing.kernel, timing.shape): timing for timing in shipped_timings(device)}
    for path in databases:
        if path.is_file():
            with TimingDatabase(path) as database:
                timings |= {(timing.kernel, timing.shape): timing for timing in database.read(device)}
    return tuple(sorted(timings.values(), key=lambda timing: (timing.kernel.key, timing.shape)))


def _timing(row: Sequence[Any]) -> KernelTiming:
    device, backend, name, precision, scales, fused, m, n, k, us, spread_us, repeats, error, document = row
    granularity = Granularity(scales) if scales else None
    kernel = Kernel(device, backend, name, Precision(precision), granularity, bool(fused))
    source = Provenance(**json.loads(document))
    return KernelTiming(kernel, Shape(m, n, k), us, spread_us, source, repeats, error)
