"""Check a ledger: read every file again and compare it with the events. Change nothing, and trust nothing."""

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from time import sleep
from typing import Any

import torch
import yaml

from fedloom.conf.progress import steps
from fedloom.fusion.exact import ExactSum
from fedloom.server.ledger.blobs import Blobs, file_digest
from fedloom.server.ledger.database import LEDGER, SEAL, TICK, content, may_have_changed, reading
from fedloom.server.ledger.rows import Contribution
from fedloom.server.ledger.sums import SumRow, sum_rows
from fedloom.server.ledger.tables import (
    EVENTS,
    FORMAT,
    LATEST,
    OLDEST,
    START,
    TABLES,
    apply,
    link,
    referenced,
    schema,
    to_event,
)

CONFIG = "config.yaml"
TRIES = 3  # checks, while others write
AWAY = "is not on this machine: a node of the cluster stores it until the run ends (federation.node_store)"
_SEAL_TEXT = re.compile(rf"([0-9a-f]{{64}})  {re.escape(LEDGER)}\n".encode())


@dataclass(frozen=True)
class Problem:
    """A fault in a file of the run's folder. A severity of 'note' means that it is unusual but does no harm."""

    file: str
    what: str
    severity: str = "problem"


@dataclass(frozen=True)
class _Refers:
    """The blobs and files that the ledger's rows refer to after one event."""

    event: int
    bits: int
    blobs: set[str]
    latest: dict[str, Contribution]
    sums: list[SumRow]
    states: dict[str, str]
    files: dict[str, str]
    apart: bool = False  # nodes of a cluster store contributions until the run ends


def check(folder: Path) -> list[Problem]:
    """Return all faults in a folder's ledger, and in the files that it refers to; empty if it has none.

    A server may be at work meanwhile. What it replaces during the check is reported as a note.
    """
    folder = Path(folder)
    if not (folder / LEDGER).is_file():
        return [Problem(LEDGER, "is missing")]
    problems = list[Problem]()
    for _ in range(TRIES):
        before, problems = content(folder / LEDGER), _found(folder)
        faulty = any(problem.severity == "problem" for problem in problems)
        if not faulty or not may_have_changed(folder / LEDGER, before):
            break  # else another process wrote to a closed ledger meanwhile
        sleep(TICK)
    return problems


def _found(folder: Path) -> list[Problem]:
    blobs = Blobs(folder / "blobs")
    problems = _guarded(SEAL, _seal(folder)) + _guarded("blobs", _named(blobs))
    refers: list[_Refers] = []
    problems += _guarded(LEDGER, _tables(folder, refers))
    if not refers:
        return problems
    damaged = any(problem.severity == "problem" and problem.file.startswith("blobs") for problem in problems)
    about_blobs = _guarded("blobs", _missing(blobs, refers[0]))
    away = any(problem.what == AWAY for problem in about_blobs)
    if not (damaged or away) and not any(problem.severity == "problem" for problem in about_blobs):
        for row in refers[0].sums:
            about_blobs += _guarded(_file(refers[0].states[row.name]), _sum(blobs, refers[0], row))
    if any(problem.severity == "problem" for problem in about_blobs) and _went_on(folder, refers[0].event):
        about_blobs = [Problem(LEDGER, "was written to during the check; check again for its blobs", "note")]
    return problems + about_blobs + _guarded(LEDGER, _finished(folder, refers[0].files))


def _guarded(file: str, step: Iterator[Problem]) -> list[Problem]:
    """Return the problems that a step yields. An exception from damaged bytes becomes one more problem, about `file`."""
    problems = []
    try:
        for problem in step:
            problems.append(problem)
    except Exception as error:
        problems.append(Problem(file, f"cannot be read ({' '.join(str(error).split())})"))
    return problems


def _file(blob: str) -> str:
    return f"blobs/{blob}.safetensors"


def _seal(folder: Path) -> Iterator[Problem]:
    if not (folder / SEAL).exists():
        return
    if not (folder / SEAL).is_file():  # such as a pipe, which would block
        yield Problem(SEAL, "is not a regular file")
        return
    match = _SEAL_TEXT.fullmatch((folder / SEAL).read_bytes())
    if match is None:
        yield Problem(SEAL, "is damaged: it must hold a sha256 and a file name")
    elif file_digest(folder / LEDGER) != match[1].decode():
        yield Problem(SEAL, f"is not the sha256 of {LEDGER}: one of the two files changed after the ledger was closed")


def _named(blobs: Blobs) -> Iterator[Problem]:
    """Yield the blobs whose sha256 is not their name, and files that are not blobs."""
    for blob in steps("checking files", sorted(blobs.names())):
        try:
            if file_digest(blobs.path(blob)) != blob:
                yield Problem(_file(blob), "is damaged: its sha256 is not its name")
        except FileNotFoundError:
            continue  # a server has just replaced it; `_missing` reports those that the ledger still refers to
        except OSError as error:
            yield Problem(_file(blob), f"cannot be read ({error.strerror or error})")
    for name in sorted(blobs.strangers()):
        yield Problem(f"blobs/{name}", "is not a blob; if no server is writing, prune the ledger", "note")


def _tables(folder: Path, refers: list[_Refers]) -> Iterator[Problem]:
    """Check the ledger file, up to the first step that reports a problem.

    Without problems, append the references of its rows to `refers`.
    """
    with closing(reading(folder / LEDGER)) as db:
        db.execute("BEGIN")
        for step in (_integrity, _chain, _replay):
            problems = list(step(db))
            yield from problems
            if problems:
                return
        yield from _guarded(CONFIG, _configuration(db, folder))
        refers.append(_references(db))


def chain(folder: Path) -> Iterator[Problem]:
    """Yield the first event that does not match its digest, or does not follow the event before it. Read no other file."""
    with closing(reading(Path(folder) / LEDGER)) as db:
        yield from _chain(db)


def chain_problems(folder: Path) -> list[Problem]:
    """Return the problem that `chain` yields, or that the ledger cannot be read; empty if its events are unbroken."""
    return _guarded(LEDGER, chain(folder))


def _integrity(db: sqlite3.Connection) -> Iterator[Problem]:
    for (line,) in db.execute("PRAGMA integrity_check(10)"):
        if line != "ok":
            yield Problem(LEDGER, f"is damaged: {' '.join(line.split())}")
    for table, row, parent, _ in db.execute("PRAGMA foreign_key_check"):
        yield Problem(LEDGER, f"table '{table}': row {row} refers to a row that is missing in '{parent}'")


def _chain(db: sqlite3.Connection) -> Iterator[Problem]:
    """Yield the first event that does not match its digest, or does not follow the event before it."""
    number, before = 0, START
    for number, (id, time, kind, body, previous, digest) in enumerate(db.execute(f"{EVENTS} ORDER BY id"), 1):
        if id != number:
            yield Problem(LEDGER, f"event {number} is missing")
        elif previous != before:
            yield Problem(LEDGER, f"event {id} ('{kind}') does not follow the one before it")
        elif link(previous, id, time, kind, body) != digest:
            yield Problem(LEDGER, f"event {id} ('{kind}') does not match its digest")
        else:
            before = digest
            continue
        return
    if not number:
        yield Problem(LEDGER, "has no events")


def _replay(db: sqlite3.Connection) -> Iterator[Problem]:
    """Apply the events to empty tables; yield, for each table, the first row that differs from the result."""
    format = json.loads(next(db.execute(f"{EVENTS} WHERE id = 1"))[3]).get("format")
    if format not in range(OLDEST, FORMAT + 1):
        known = f"this fedloom reads {OLDEST} to {FORMAT}"
        yield Problem(LEDGER, f"has format {format}, but {known}; use the fedloom that wrote it")
        return
    with closing(sqlite3.connect("", isolation_level=None)) as again:
        again.execute("PRAGMA foreign_keys=ON")
        again.execute("BEGIN")
        for statement in schema(format):
            again.execute(statement)
        for row in db.execute(f"{EVENTS} ORDER BY id"):
            try:
                apply(again, to_event(row))
            except Exception as error:
                yield Problem(LEDGER, f"event {row[0]} ('{row[2]}') cannot be replayed ({error})")
                return
        queries = {table: f"SELECT * FROM {table} ORDER BY 1, 2" for table in TABLES}
        for table, query in {**queries, "sqlite_master": "SELECT name, sql FROM sqlite_master ORDER BY 1"}.items():
            for is_there, expected in zip_longest(db.execute(query), again.execute(query)):
                if is_there != expected:
                    row = (is_there or expected)[:2]
                    yield Problem(LEDGER, f"table '{table}': row {row} does not follow from the events")
                    break


def _configuration(db: sqlite3.Connection, folder: Path) -> Iterator[Problem]:
    (text,) = db.execute("SELECT config FROM runs").fetchone()
    if not (folder / CONFIG).exists():
        yield Problem(CONFIG, "is missing")
    elif not (folder / CONFIG).is_file():
        yield Problem(CONFIG, "is not a regular file")
    elif (folder / CONFIG).read_bytes() != text.encode():
        yield Problem(CONFIG, "is not the configuration that the ledger stores")


def _references(db: sqlite3.Connection) -> _Refers:
    (bits,) = db.execute("SELECT bits FROM runs").fetchone()
    (event,) = db.execute("SELECT max(id) FROM events").fetchone()
    (states,) = db.execute("SELECT states FROM rounds ORDER BY round DESC LIMIT 1").fetchone() or ("{}",)
    files = _results(db)
    latest = {site: Contribution(*row) for site, *row in db.execute(LATEST)}
    created = json.loads(db.execute("SELECT body FROM events WHERE id = 1").fetchone()[0])
    names = json.loads(states)
    return _Refers(event, bits, referenced(db), latest, sum_rows(created, names), names, files, _apart(created))


def _results(db: sqlite3.Connection) -> dict[str, str]:
    """Return the sha256 of the result files when the run finished.

    Empty if the run was resumed or sites were forgotten since.
    """
    kinds = "'finished', 'interrupted', 'failed', 'resumed', 'extended', 'forgotten', 'rolled back'"
    kind, body = db.execute(
        f"SELECT kind, body FROM events WHERE kind IN ({kinds}) ORDER BY id DESC LIMIT 1"
    ).fetchone() or ("resumed", "{}")
    return json.loads(body).get("files", {}) if kind == "finished" else {}


def results(folder: Path) -> dict[str, bool]:
    """Return, by path in the folder, whether a file is unchanged since the run finished. Missing files are left out."""
    with closing(reading(folder / LEDGER)) as db:
        files = _results(db)
    return {name: file_digest(folder / name) == digest for name, digest in files.items() if (folder / name).is_file()}


def _apart(created: Mapping[str, Any]) -> bool:
    """Return whether the configuration makes nodes store contributions."""
    config = yaml.safe_load(created["config"])
    return bool(isinstance(config, dict) and (config.get("federation") or {}).get("node_store"))


def _missing(blobs: Blobs, refers: _Refers) -> Iterator[Problem]:
    names = blobs.names()
    for blob in sorted(refers.blobs - names):
        fault = (AWAY, "note") if refers.apart and not refers.files else ("is missing: the ledger refers to it", "problem")
        yield Problem(_file(blob), *fault)
    for blob in sorted(names - refers.blobs):
        yield Problem(_file(blob), "is an orphan: the ledger does not refer to it; prune removes it", "note")


def _sum(blobs: Blobs, refers: _Refers, row: SumRow) -> Iterator[Problem]:
    """Compare a stored sum with the exact sum of the latest contributions, which are read one by one."""
    stored = blobs.get(refers.states[row.name])
    added = ExactSum(refers.bits, modular=True)
    for site, contribution in steps("adding contributions up", refers.latest.items()):
        part = row.of(blobs.get(contribution.blob), stored, refers.bits)
        if absent := stored.keys() - part.keys() if part or not row.prefix else ():
            yield Problem(_file(contribution.blob), f"{site}'s contribution lacks the sum's tensor '{min(absent)}'")
            return
        if part:
            added.add(part, row.times(contribution.samples))
    for name, tensor in stored.items():
        expected = added.totals.get(name, torch.zeros_like(tensor))
        if tensor.dtype != torch.int64 or not torch.equal(tensor, expected):
            yield Problem(_file(refers.states[row.name]), f"is not the sum of the latest contributions (tensor '{name}')")


def _went_on(folder: Path, event: int) -> bool:
    """Return whether the ledger has events after this one."""
    try:
        with closing(reading(folder / LEDGER)) as db:
            return db.execute("SELECT max(id) FROM events").fetchone()[0] > event
    except (sqlite3.Error, UnicodeDecodeError):
        return False


def _finished(folder: Path, files: dict[str, str]) -> Iterator[Problem]:
    """Yield the result files that are missing or changed since the run finished."""
    for name, digest in files.items():
        if not (folder / name).is_file():
            yield Problem(name, "is missing: it existed when the run finished")
        else:
            yield from _guarded(name, _unchanged(folder, name, digest))


def _unchanged(folder: Path, name: str, digest: str) -> Iterator[Problem]:
    if file_digest(folder / name) != digest:
        yield Problem(name, "was changed after the run finished")
