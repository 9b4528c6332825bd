"""The tables of a ledger and the events that fill them: `apply` writes every row, in a run and in its replay."""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fedloom.conf.errors import unknown
from fedloom.server.ledger.blobs import LedgerError
from fedloom.server.ledger.rows import MOVES, decoded
from fedloom.server.run_folder.layout import LEDGER

FORMAT, OLDEST = 4, 2  # the format of new ledgers, and the oldest format that is read and continued
THINNED = "thinned"  # an event: the run can no longer go back to earlier rounds
BEGUN = ("begun", "leaving")  # events: the server begins to apply a request, or (with masks) to let its sites leave
START = "0" * 64  # the digest before the first event
TABLES = ("runs", "sites", "rounds", "contributions", "requests")
EVENTS = "SELECT id, time, kind, body, previous, digest FROM events"
LATEST = """SELECT site, blob, samples, round, bits FROM sites CROSS JOIN contributions ON site = name
    WHERE NOT forgotten AND round = (SELECT max(round) FROM contributions WHERE site = name) ORDER BY place"""
REPLACED = """WHERE round < (
    SELECT max(round) FROM contributions AS other WHERE other.site = contributions.site AND other.round <= ?)"""
WITH_STATES = "WHERE +round < ? AND states <> '{}'"  # +: by the index
SCHEMA = (
    """CREATE TABLE runs (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        run TEXT NOT NULL,
        config TEXT NOT NULL,
        bits INTEGER NOT NULL CHECK (bits BETWEEN 0 AND 62),
        created TEXT NOT NULL,
        format INTEGER NOT NULL)""",  # plain: ignore
    """CREATE TABLE sites (
        name TEXT PRIMARY KEY NOT NULL CHECK (name <> ''),
        place INTEGER NOT NULL UNIQUE CHECK (place >= 0),
        forgotten INTEGER NOT NULL DEFAULT 0 CHECK (forgotten IN (0, 1)))""",  # plain: ignore
    """CREATE TABLE rounds (
        round INTEGER PRIMARY KEY CHECK (round >= 0),
        time TEXT NOT NULL,
        record TEXT CHECK (record IS NULL OR json_valid(record)),
        states TEXT NOT NULL CHECK (json_valid(states)),
        digest TEXT NOT NULL CHECK (json_valid(digest)))""",  # plain: ignore
    """CREATE TABLE contributions (
        site TEXT NOT NULL REFERENCES sites,
        round INTEGER NOT NULL REFERENCES rounds,
        blob TEXT NOT NULL CHECK (length(blob) = 64 AND blob NOT GLOB '*[^0-9a-f]*'),
        samples INTEGER NOT NULL CHECK (samples >= 0),
        bits INTEGER NOT NULL CHECK (bits BETWEEN 0 AND 62),
        PRIMARY KEY (site, round))""",  # plain: ignore
    """CREATE TABLE requests (
        id TEXT PRIMARY KEY NOT NULL CHECK (id <> ''),
        kind TEXT NOT NULL CHECK (kind <> ''),
        sites TEXT NOT NULL CHECK (json_valid(sites)),
        reason TEXT NOT NULL,
        options TEXT NOT NULL CHECK (json_valid(options)),
        state TEXT NOT NULL CHECK (state IN ('received', 'applied', 'verified', 'refused')),
        result TEXT CHECK (result IS NULL OR json_valid(result)))""",  # plain: ignore
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY CHECK (id >= 1),
        time TEXT NOT NULL,
        kind TEXT NOT NULL CHECK (kind <> ''),
        body TEXT NOT NULL CHECK (json_valid(body)),
        previous TEXT NOT NULL CHECK (length(previous) = 64),
        digest TEXT NOT NULL CHECK (length(digest) = 64))""",  # plain: ignore
    f"""CREATE TRIGGER events_next BEFORE INSERT ON events
        WHEN NEW.id <> (SELECT coalesce(max(id), 0) + 1 FROM events)
            OR NEW.previous <> coalesce((SELECT digest FROM events ORDER BY id DESC LIMIT 1), '{START}')
        BEGIN SELECT raise(ABORT, 'events are only added at the end'); END""",
    """CREATE TRIGGER events_stay BEFORE UPDATE ON events
        BEGIN SELECT raise(ABORT, 'events are never changed'); END""",
    """CREATE TRIGGER events_last BEFORE DELETE ON events
        BEGIN SELECT raise(ABORT, 'events are never deleted'); END""",
)
FLOATS = 4  # since this format, contributions that arrive as floats are stored as floats; before, as integers
INDEXES = (  # since format 3: the cost of a change does not grow with the run
    "CREATE INDEX contributions_of_blob ON contributions (blob)",
    "CREATE INDEX rounds_with_states ON rounds (round) WHERE states <> '{}'",
    "CREATE INDEX events_of_kind ON events (kind)",
)
_WATCH = (  # SQLite notes what a transaction removes from the rows; belongs to the connection, not to the file
    "CREATE TEMP TABLE IF NOT EXISTS dropped (blob TEXT NOT NULL)",
    """CREATE TEMP TRIGGER IF NOT EXISTS contribution_dropped AFTER DELETE ON main.contributions
        BEGIN INSERT INTO dropped VALUES (OLD.blob); END""",
    """CREATE TEMP TRIGGER IF NOT EXISTS round_dropped AFTER DELETE ON main.rounds
        BEGIN INSERT INTO dropped SELECT value FROM json_each(OLD.states); END""",
    """CREATE TEMP TRIGGER IF NOT EXISTS states_dropped AFTER UPDATE OF states ON main.rounds
        BEGIN INSERT INTO dropped SELECT value FROM json_each(OLD.states); END""",
)


@dataclass(frozen=True)
class Event:
    """Something that happened to the run.

    Attributes:
        id: Its number in the ledger.
        time: The time of the commit.
        kind: What happened, such as "round" or "forgotten".
        body: The facts.
        previous: The digest of the event before it.
        digest: The SHA-256 of this event and, through `previous`, of all events before it.
    """

    id: int
    time: str
    kind: str
    body: dict[str, Any]
    previous: str
    digest: str


def schema(format: int) -> tuple[str, ...]:
    """Return the statements that create the tables of a ledger of this format."""
    return SCHEMA if format == OLDEST else SCHEMA + INDEXES


def canonical(value: Any) -> str:
    """Return the one JSON text of a value: keys sorted, no spaces, ASCII. Raises LedgerError if JSON cannot express it."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"a value for the ledger cannot be written as JSON ({error})") from None


def link(previous: str, id: int, time: str, kind: str, body: str) -> str:
    """Return the sha256 of an event with this canonical body, chained to the `previous` event's digest."""
    return hashlib.sha256(f"{previous}[{id},{canonical(time)},{canonical(kind)},{body}]".encode()).hexdigest()


def append(db: sqlite3.Connection, kind: str, body: dict[str, Any]) -> Event:
    """Write the next event, apply it to the tables, and return it."""
    text = canonical(body)
    last, previous = db.execute("SELECT id, digest FROM events ORDER BY id DESC LIMIT 1").fetchone() or (0, START)
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    row = (last + 1, time, kind, text, previous, link(previous, last + 1, time, kind, text))
    db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", row)
    event = to_event(row)
    apply(db, event)
    return event


def to_event(row: tuple) -> Event:
    """Return the event in a row of the query EVENTS. Raises LedgerError if it does not match its digest."""
    id, time, kind, body, previous, digest = row
    if link(previous, id, time, kind, body) != digest:
        raise LedgerError(f"{LEDGER}: the chain is broken at event {id} ('{kind}'); restore the file from a copy of the run")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise LedgerError(f"{LEDGER}: event {id} ('{kind}') is damaged; restore the file from a copy of the run")
    return Event(id, time, kind, content, previous, digest)


def apply(db: sqlite3.Connection, event: Event) -> None:
    """Apply an event to the tables. Most kinds of event change none."""
    if event.kind in WRITING:
        WRITING[event.kind](db, event.time, event.body)


def referenced(db: sqlite3.Connection) -> set[str]:
    """Return the digests of all blobs that a row refers to."""
    blobs = {blob for (blob,) in db.execute("SELECT blob FROM contributions")}
    for (states,) in db.execute("SELECT states FROM rounds WHERE states <> '{}'"):
        blobs.update(decoded(states).values())
    return blobs


def watch(db: sqlite3.Connection) -> None:
    """From here on, record the blobs to which rows drop a reference (see `unreferenced`)."""
    for statement in _WATCH:
        db.execute(statement)
    db.execute("DELETE FROM dropped")


def unreferenced(db: sqlite3.Connection) -> list[str]:
    """Return the digests of blobs that a row referred to since `watch`, but no row does now."""
    states = "SELECT value FROM rounds, json_each(states) WHERE states <> '{}'"
    sql = f"SELECT DISTINCT blob FROM dropped WHERE blob NOT IN (SELECT blob FROM contributions) AND blob NOT IN ({states})"
    return [blob for (blob,) in db.execute(sql)]


def check_round(db: sqlite3.Connection, round: int) -> None:
    """Raise LedgerError unless the round is later than all committed rounds."""
    (last,) = db.execute("SELECT coalesce(max(round), -1) FROM rounds").fetchone()
    if round <= last:
        raise LedgerError(f"round {round} cannot follow the committed round {last}; continue with round {last + 1}")


def check_sites(db: sqlite3.Connection, sites: Iterable[str], forgotten: bool | None = None) -> None:
    """Raise LedgerError for a site that is unknown, repeated or, if `forgotten` is set, not in that state."""
    sites = list(sites)
    check_repeated(sites)
    for site in sites:
        row = db.execute("SELECT forgotten FROM sites WHERE name = ?", (site,)).fetchone()
        if row is None:
            raise LedgerError(str(unknown("site", site, (name for (name,) in db.execute("SELECT name FROM sites")))))
        if forgotten is not None and row[0] != forgotten:
            is_not, others = ("is not", "are") if forgotten else ("is", "are not")
            rest = db.execute("SELECT name FROM sites WHERE forgotten = ? ORDER BY place", (forgotten,))
            names = ", ".join(name for (name,) in rest) or "none"
            raise LedgerError(f"site '{site}' {is_not} forgotten (these {others}: {names})")


def check_repeated(sites: Iterable[str]) -> None:
    """Raise LedgerError for a site that is named twice."""
    seen = set()
    for site in sites:
        if site in seen:
            raise LedgerError(f"site '{site}' is named twice; name it once")
        seen.add(site)


def check_move(db: sqlite3.Connection, id: str, state: str) -> None:
    """Raise LedgerError unless the request exists and may become `state` (MOVES)."""
    row = db.execute("SELECT state FROM requests WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise LedgerError(str(unknown("request", id, (name for (name,) in db.execute("SELECT id FROM requests")))))
    if (row[0], state) not in MOVES:
        takes = ", ".join(later for earlier, later in MOVES if earlier == row[0]) or "nothing else"
        raise LedgerError(f"request '{id}' is {row[0]}: it cannot become '{state}' (it can become {takes})")


def refused(db: sqlite3.Connection, id: str) -> bool:
    """Return whether a request is refused."""
    return db.execute("SELECT 1 FROM requests WHERE id = ? AND state = 'refused'", (id,)).fetchone() is not None


def begun(db: sqlite3.Connection, id: str) -> bool:
    """Return whether the server has begun to apply a request."""
    bodies = db.execute("SELECT body FROM events WHERE kind IN (?, ?)", BEGUN)
    return any(decoded(body).get("request") == id for (body,) in bodies)


def _created(db: sqlite3.Connection, time: str, body: dict[str, Any]) -> None:
    row = (body["run"], body["config"], body["bits"], time, body["format"])
    db.execute("INSERT INTO runs VALUES (1, ?, ?, ?, ?, ?)", row)
    db.executemany("INSERT INTO sites VALUES (?, ?, 0)", [(name, index) for index, name in enumerate(body["sites"])])


def _round(db: sqlite3.Connection, time: str, body: dict[str, Any]) -> None:
    number, record = body["round"], body["record"]
    texts = (None if record is None else canonical(record), canonical(body["states"]), canonical(body["digest"]))
    db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?)", (number, time, *texts))
    if body["keep"] == "latest":
        _delete(db, body["contributions"])
        db.execute(f"UPDATE rounds SET states = '{{}}' {WITH_STATES}", (number,))
    _insert(db, body["contributions"])


def _forgotten(db: sqlite3.Connection, time: str, body: dict[str, Any]) -> None:
    _delete(db, body["sites"])
    _mark(db, body["sites"], 1)
    db.execute("UPDATE rounds SET states = '{}' WHERE states <> '{}'")
    _replace(db, body)


def _rolled_back(db: sqlite3.Connection, time: str, body: dict[str, Any]) -> None:
    db.execute("DELETE FROM contributions WHERE round > ?", (body["round"],))
    db.execute("DELETE FROM rounds WHERE round > ?", (body["round"],))


def _thinned(db: sqlite3.Connection, time: str, body: dict[str, Any]) -> None:
    """Remove what only going back to an earlier round needs: the states of earlier rounds, and replaced contributions."""
    db.execute(f"DELETE FROM contributions {REPLACED}", (body["round"],))
    db.execute(f"UPDATE rounds SET states = '{{}}' {WITH_STATES}", (body["round"],))


def _readmitted(db: sqlite3.Connection, time: str, body: dict[str, Any]) -> None:
    _mark(db, body["sites"], 0)
    _insert(db, body["contributions"])
    _replace(db, body)


def _received(db: sqlite3.Connection, time: str, body: dict[str, Any]) -> None:
    row = (body["id"], body["kind"], canonical(body["sites"]), body["reason"], canonical(body["options"]))
    db.execute("INSERT INTO requests VALUES (?, ?, ?, ?, ?, 'received', NULL)", row)


def _extended(db: sqlite3.Connection, time: str, body: dict[str, Any]) -> None:
    db.execute("UPDATE runs SET config = ?", (body["config"],))


def _moved(state: str) -> Callable[[sqlite3.Connection, str, dict[str, Any]], None]:
    def write(db: sqlite3.Connection, time: str, body: dict[str, Any]) -> None:
        result = None if body["result"] is None else canonical(body["result"])
        db.execute("UPDATE requests SET state = ?, result = ? WHERE id = ?", (state, result, body["id"]))

    return write


def _delete(db: sqlite3.Connection, sites: Iterable[str]) -> None:
    db.executemany("DELETE FROM contributions WHERE site = ?", [(site,) for site in sites])


def _insert(db: sqlite3.Connection, contributions: dict[str, dict[str, Any]]) -> None:
    rows = [(site, row["round"], row["blob"], row["samples"], row["bits"]) for site, row in contributions.items()]
    db.executemany("INSERT INTO contributions VALUES (?, ?, ?, ?, ?)", rows)


def _mark(db: sqlite3.Connection, sites: Iterable[str], forgotten: int) -> None:
    db.executemany("UPDATE sites SET forgotten = ? WHERE name = ?", [(forgotten, site) for site in sites])


def _replace(db: sqlite3.Connection, body: dict[str, Any]) -> None:
    """Replace the states of the last round."""
    texts = (canonical(body["states"]), canonical(body["digest"]))
    db.execute("UPDATE rounds SET states = ?, digest = ? WHERE round = (SELECT max(round) FROM rounds)", texts)


WRITING: dict[str, Callable[[sqlite3.Connection, str, dict[str, Any]], None]] = {
    "created": _created,
    "round": _round,
    "forgotten": _forgotten,
    "readmitted": _readmitted,
    "rolled back": _rolled_back,
    "extended": _extended,
    THINNED: _thinned,
    "received": _received,
    "applied": _moved("applied"),
    "verified": _moved("verified"),
    "refused": _moved("refused"),
}
