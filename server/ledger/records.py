"""What a ledger holds, to be read: by its server, or beside it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fedloom.conf.errors import UserError
from fedloom.server.ledger.blobs import Blobs, LedgerError
from fedloom.server.ledger.database import LEDGER, Database
from fedloom.server.ledger.rows import Contribution, Request, RoundRow, RunRow
from fedloom.server.ledger.sums import SumRow, sum_rows
from fedloom.server.ledger.tables import EVENTS, FORMAT, LATEST, OLDEST, Event, to_event

T = TypeVar("T")
BOUND = "bound"  # an event
_ROUNDS = "SELECT round, time, record, states, digest FROM rounds"
_HISTORY = "SELECT blob, samples, round, bits FROM contributions WHERE site = ? ORDER BY round"
REQUESTS = "SELECT id, kind, sites, reason, options, state, result FROM requests"
_PAGE = 1000  # events read at a time
_TRIES = 5  # to read several things of one state beside a server


class Records:
    """A ledger's rows, events and blobs."""

    def __init__(self, folder: Path, server: bool) -> None:
        self.folder = Path(folder)
        self.blobs = Blobs(self.folder / "blobs")
        self._database = Database(self.folder / LEDGER, server)

    @property
    def server(self) -> bool:
        """Whether it was opened to be written."""
        return self._database.server

    def steady(self, read: Callable[[], T]) -> T:
        """What `read` makes of one and the same state: again, if a server has committed another one meanwhile.

        A row that was read names a blob which is gone once the server has replaced it. Raises UserError if the server
        commits during every try.
        """
        for _ in range(_TRIES):
            before = self.last_round()
            try:
                found = read()
            except UserError:
                if self.last_round() == before:
                    raise
                continue
            if self.last_round() == before:
                return found
        raise UserError(f"{self.folder}: a server is at work and commits round after round; ask again when it is done")

    # Rounds

    def latest(self, site: str) -> Contribution | None:
        """The site's last contribution; None if it has none (any more)."""
        rows = self._query(f"{_HISTORY} DESC LIMIT 1", site)
        return Contribution(*rows[0]) if rows else None

    def all_latest(self) -> dict[str, Contribution]:
        """The last contribution of each site that has one, in the sites' order."""
        return {site: Contribution(*row) for site, *row in self._query(LATEST)}

    def referred(self) -> set[str]:
        """The digests of all contributions that are kept."""
        return {blob for (blob,) in self._query("SELECT DISTINCT blob FROM contributions")}

    def history(self, site: str) -> list[Contribution]:
        """All contributions of a site that are kept, oldest first."""
        return [Contribution(*row) for row in self._query(_HISTORY, site)]

    def last_round(self) -> RoundRow | None:
        """The last committed round; None before the start."""
        rows = self._query(f"{_ROUNDS} ORDER BY round DESC LIMIT 1")
        return RoundRow.of(rows[0]) if rows else None

    def rounds(self) -> list[RoundRow]:
        """All committed rounds, oldest first."""
        return [RoundRow.of(row) for row in self._query(f"{_ROUNDS} ORDER BY round")]

    def sites(self) -> dict[str, bool]:
        """All sites in their order, and whether each is forgotten."""
        return {name: bool(gone) for name, gone in self._query("SELECT name, forgotten FROM sites ORDER BY place")}

    def sums(self) -> list[SumRow]:
        """The sums of the method that are kept."""
        last = self.last_round()
        return sum_rows(next(self.events("created")).body, last.states if last else {})

    def run(self) -> RunRow:
        """The run that this is the ledger of."""
        return RunRow(*self._query("SELECT run, config, bits, created, format FROM runs")[0])

    # Requests, nodes and events

    def request(self, id: str) -> Request | None:
        """The request of that id, if there is one."""
        rows = self._query(f"{REQUESTS} WHERE id = ?", id)
        return Request.of(rows[0]) if rows else None

    def waiting(self, *, applied: bool = False) -> list[Request]:
        """The requests that were received and not applied, oldest first; `applied`: also those that are not verified yet."""
        sql = f"{REQUESTS} WHERE state = 'received' OR (? AND state = 'applied') ORDER BY rowid"
        return [Request.of(row) for row in self._query(sql, applied)]

    def bound(self) -> dict[str, int]:
        """To which node each site's contributions belong, as it was noted last."""
        found: dict[str, int] = {}
        for event in self.events(BOUND):
            found |= event.body["nodes"]
        return found

    def keys(self) -> dict[str, str]:
        """The digest of the public key that each site joined with; without those that joined without one, or were moved."""
        found: dict[str, str] = {}
        for event in self.events(BOUND):
            found = {site: key for site, key in found.items() if site not in event.body["nodes"]}
            found |= event.body.get("keys", {})
        return found

    def events(self, kind: str = "", after: int = 0) -> Iterator[Event]:
        """The events, oldest first; of one kind, if it is given, and with ids above `after`."""
        which, values = (" AND kind = ?", [kind]) if kind else ("", [])
        while rows := self._query(f"{EVENTS} WHERE id > ?{which} ORDER BY id LIMIT {_PAGE}", after, *values):
            yield from map(to_event, rows)
            after = rows[-1][0]

    def newest(self, kind: str = "") -> Event | None:
        """The last event; of one kind, if it is given."""
        which, values = (" WHERE kind = ?", [kind]) if kind else ("", [])
        rows = self._query(f"{EVENTS}{which} ORDER BY id DESC LIMIT 1", *values)
        return to_event(rows[0]) if rows else None

    def _query(self, sql: str, *values: Any) -> list[tuple]:
        return self._database.query(sql, *values)

    def _check_format(self) -> None:
        try:
            ((version,),) = self._query("SELECT format FROM runs")
        except (LedgerError, ValueError) as error:
            raise LedgerError(f"{self._database.path}: holds no run ({error}); put it back from a copy of the run") from None
        if not isinstance(version, int) or not OLDEST <= version <= FORMAT:
            known = f"this fedloom reads {OLDEST} to {FORMAT}"
            raise LedgerError(f"{self._database.path}: has format {version}, {known}; use the fedloom that wrote it")
