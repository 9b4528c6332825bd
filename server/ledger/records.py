"""Read access to a ledger: its rows, events and blobs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fedloom.conf.errors import UserError
from fedloom.server.ledger.blobs import Blobs, LedgerError
from fedloom.server.ledger.database import LEDGER, Database
from fedloom.server.ledger.rows import STATES, Contribution, Request, RoundRow, RunRow
from fedloom.server.ledger.sums import SumRow, sum_rows
from fedloom.server.ledger.tables import EVENTS, FORMAT, LATEST, OLDEST, Event, to_event

T = TypeVar("T")
BOUND = "bound"  # an event
STOPPED = "stopped"  # an event, and a key of the summary
LIFTING = ("extended", "rolled back")  # later events after which a stopped run goes on
_ROUNDS = "SELECT round, time, record, states, digest FROM rounds"
_HISTORY = "SELECT blob, samples, round, bits FROM contributions WHERE site = ? ORDER BY round"
_BY = """SELECT json_extract(body, '$.by') FROM events
    WHERE kind = 'received' AND json_extract(body, '$.id') = requests.id"""  # plain: ignore
REQUESTS = f"SELECT id, kind, sites, reason, options, state, result, ({_BY}) FROM requests"
_PAGE = 1000  # events read at a time
_TRIES = 5  # to read several rows of one state while a server writes


class Records:
    """Read a ledger: its contributions, events and blobs.

    Args:
        folder: The folder of the run.
        server: Open the ledger for writing, as the run's one server does.
        lock: The descriptor of the ledger's lock, if the server already holds it.
    """

    def __init__(self, folder: Path, server: bool, lock: int | None = None) -> None:
        self.folder = Path(folder)
        self.blobs = Blobs(self.folder / "blobs")
        self._database = Database(self.folder / LEDGER, server, lock)

    @property
    def writable(self) -> bool:
        """Whether the ledger is open for writing."""
        return self._database.server

    def steady(self, read: Callable[[], T]) -> T:
        """Return the result of `read`, called again if a server has committed a round meanwhile.

        A row may name a blob that the server has replaced since. Raises UserError if the server commits during every try.
        """
        for _ in range(_TRIES):
            before = self.last_round()
            try:
                result = read()
            except UserError:
                if self.last_round() == before:
                    raise
                continue
            if self.last_round() == before:
                return result
        raise UserError(f"{self.folder}: a server commits round after round; try again when it has finished")

    # Rounds

    def latest(self, site: str) -> Contribution | None:
        """Return the site's last contribution; None if it has none."""
        rows = self._query(f"{_HISTORY} DESC LIMIT 1", site)
        return Contribution(*rows[0]) if rows else None

    def all_latest(self) -> dict[str, Contribution]:
        """Return the last contribution of each site that has one, in the order of the sites."""
        return {site: Contribution(*row) for site, *row in self._query(LATEST)}

    def referred(self) -> set[str]:
        """Return the digests of all contributions that the ledger refers to."""
        return {blob for (blob,) in self._query("SELECT DISTINCT blob FROM contributions")}

    def history(self, site: str) -> list[Contribution]:
        """Return all stored contributions of a site, oldest first."""
        return [Contribution(*row) for row in self._query(_HISTORY, site)]

    def last_round(self) -> RoundRow | None:
        """Return the last committed round; None before the start."""
        rows = self._query(f"{_ROUNDS} ORDER BY round DESC LIMIT 1")
        return RoundRow.of(rows[0]) if rows else None

    def rounds(self) -> list[RoundRow]:
        """Return all committed rounds, oldest first."""
        return [RoundRow.of(row) for row in self._query(f"{_ROUNDS} ORDER BY round")]

    def sites(self) -> dict[str, bool]:
        """Return, by site in their order, whether it is forgotten."""
        return {name: bool(forgotten) for name, forgotten in self._query("SELECT name, forgotten FROM sites ORDER BY place")}

    def stopped(self) -> dict[str, Any] | None:
        """Return the round after which the run was stopped before its last one, and the reason; None if it was not."""
        last, later = self.newest(STOPPED), [self.newest(kind) for kind in LIFTING]
        return None if last is None or any(event and event.id > last.id for event in later) else last.body

    def sums(self) -> list[SumRow]:
        """Return the descriptions of the method's sums that the last round stores."""
        last = self.last_round()
        return sum_rows(next(self.events("created")).body, last.states if last else {})

    def run(self) -> RunRow:
        """Return the ledger's row about the run: configuration, unit, format and more."""
        return RunRow(*self._query("SELECT run, config, bits, created, format FROM runs")[0])

    # Requests, nodes and events

    def request(self, id: str) -> Request | None:
        """Return the request with this id; None for an unknown id."""
        rows = self._query(f"{REQUESTS} WHERE id = ?", id)
        return Request.of(rows[0]) if rows else None

    def waiting(self, *, applied: bool = False) -> list[Request]:
        """Return the requests that are received but not applied, oldest first; with `applied`, also the applied ones."""
        sql = f"{REQUESTS} WHERE state = 'received' OR (? AND state = 'applied') ORDER BY rowid"
        return [Request.of(row) for row in self._query(sql, applied)]

    def requests(self) -> list[Request]:
        """Return all requests, oldest first."""
        return [Request.of(row) for row in self._query(f"{REQUESTS} ORDER BY rowid")]

    def dates(self) -> dict[str, dict[str, str]]:
        """Return, by request, when it reached each of its states."""
        dates: dict[str, dict[str, str]] = {}
        for state in STATES:
            for event in self.events(state):
                dates.setdefault(event.body["id"], {})[state] = event.time
        return dates

    def bound(self) -> dict[str, int]:
        """Return, by site, the node that its contributions belong to now."""
        nodes: dict[str, int] = {}
        for event in self.events(BOUND):
            nodes |= event.body["nodes"]
        return nodes

    def keys(self) -> dict[str, str]:
        """Return, by site, the digest of the public key that it joined with.

        Sites that joined without a key, or were moved to another node, are left out.
        """
        keys: dict[str, str] = {}
        for event in self.events(BOUND):
            keys = {site: key for site, key in keys.items() if site not in event.body["nodes"]}
            keys |= event.body.get("keys", {})
        return keys

    def events(self, kind: str = "", after: int = 0) -> Iterator[Event]:
        """Yield the events with ids above `after`, oldest first; only those of `kind`, if it is set."""
        which, values = (" AND kind = ?", [kind]) if kind else ("", [])
        while rows := self._query(f"{EVENTS} WHERE id > ?{which} ORDER BY id LIMIT {_PAGE}", after, *values):
            yield from map(to_event, rows)
            after = rows[-1][0]

    def newest(self, kind: str = "") -> Event | None:
        """Return the last event, or the last of `kind` if it is set; None without one."""
        which, values = (" WHERE kind = ?", [kind]) if kind else ("", [])
        rows = self._query(f"{EVENTS}{which} ORDER BY id DESC LIMIT 1", *values)
        return to_event(rows[0]) if rows else None

    def _query(self, sql: str, *values: Any) -> list[tuple]:
        return self._database.query(sql, *values)

    def _check_format(self) -> None:
        try:
            ((version,),) = self._query("SELECT format FROM runs")
        except (LedgerError, ValueError) as error:
            raise LedgerError(f"{self._database.path}: has no run ({error}); restore it from a copy of the run") from None
        if not isinstance(version, int) or not OLDEST <= version <= FORMAT:
            known = f"this fedloom reads {OLDEST} to {FORMAT}"
            raise LedgerError(f"{self._database.path}: has format {version}, but {known}; use the fedloom that wrote it")
