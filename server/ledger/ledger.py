"""The durable record of a run: who contributed what, what was asked, and every event in an unbroken chain.

One SQLite file with the states beside it (`blobs/`). What is committed survives any crash; what is not never happened.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.server.ledger.blobs import LedgerError, told
from fedloom.server.ledger.database import LEDGER, make
from fedloom.server.ledger.records import BOUND, REQUESTS, Records
from fedloom.server.ledger.rows import Contribution, Request
from fedloom.server.ledger.sums import ONE
from fedloom.server.ledger.tables import (
    FORMAT,
    WRITING,
    append,
    check_move,
    check_repeated,
    check_round,
    check_sites,
    referenced,
    schema,
    unreferenced,
    watch,
)


class Ledger(Records):
    """The ledger in a run's folder: `create` or `open` one. As a context manager it is closed at the end."""

    @classmethod
    def create(
        cls, folder: Path, run: str, config: str, bits: int, sites: Sequence[str], sums: Mapping[str, Any] = ONE,
        slots: Sequence[str] | None = None,
    ) -> "Ledger":  # fmt: skip
        """A new ledger, held as its one server. `sums`: the method's, as the ledger's first event says (server.ledger.sums);
        `slots`: the names of all its slots.


        Raises LedgerError if there is one or the folder cannot be written.
        """
        check_repeated(sites)
        make(Path(folder) / LEDGER)
        ledger = cls(folder, server=True)
        body = {"run": run, "config": config, "bits": bits, "format": FORMAT, "sites": list(sites), "sums": dict(sums)}
        body |= {} if slots is None else {"slots": list(slots)}
        try:
            with told(ledger.blobs.folder):
                ledger.blobs.folder.mkdir(exist_ok=True)
            with ledger._database.transaction() as db:
                for statement in schema(FORMAT):
                    db.execute(statement)
                append(db, "created", body)
        except BaseException:
            ledger._database.close()
            raise
        return ledger

    @classmethod
    def open(cls, folder: Path, *, server: bool = True) -> "Ledger":
        """The ledger of a folder: as its one server, or to read it and to queue requests while a server may run.

        Raises LedgerError if there is none, it is not one of this format, or another server has it.
        """
        if not (Path(folder) / LEDGER).is_file():
            raise LedgerError(f"{folder}: has no ledger ({LEDGER}); name the folder of a run that keeps one")
        ledger = cls(folder, server)
        try:
            ledger._check_format()
            if server:
                with ledger._database.transaction():
                    pass  # breaks the seal, and tells now if nothing can be written
        except BaseException:
            ledger._database.close()
            raise
        return ledger

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, UserError):  # refused: nothing is half done, and what was said counts more than the seal
            with suppress(UserError, OSError):
                self.close()
        else:
            self._database.close()

    def close(self) -> None:
        """A server: bring everything into ledger.sqlite and write ledger.sha256; all: let go. Closing twice is harmless."""
        try:
            self._database.seal()
        finally:
            self._database.close()

    def in_place(self) -> bool:
        """Whether this is the server of what is in the folder now: it may have been moved, and another run be there."""
        return self._database.in_place()

    def refuse_moved(self) -> None:
        """Raises LedgerError unless it is."""
        self._database.refuse_moved()

    # Rounds

    def commit_round(
        self,
        round: int,
        contributions: Mapping[str, Contribution],
        states: Mapping[str, str],
        digest: Mapping[str, str],
        record: dict[str, Any] | None,
        keep: str,
    ) -> None:
        """Write a round whose blobs are there; 0 is the start. keep: 'latest' (replaced rows and blobs go) or 'all'.

        Raises LedgerError for a round that is not the next one, for sites that are unknown or forgotten, for blobs that are
        missing, and if the disk refuses; nothing is written then.
        """
        body = {"round": round, "contributions": _plain(contributions), "states": dict(states), "digest": dict(digest)}
        if keep not in ("latest", "all"):
            raise LedgerError(f"round {round}: keep is '{keep}', not 'latest' or 'all'")
        if odd := {one.round for one in contributions.values()} - {round}:
            raise LedgerError(f"round {round}: a contribution is of round {min(odd)}; commit each in its own round")
        self.blobs.settle(_blobs(contributions, states))
        with self._replacing() as db:
            check_round(db, round)
            check_sites(db, contributions, forgotten=False)
            append(db, "round", {**body, "record": record, "keep": keep})

    # Forgetting

    def forget(
        self,
        sites: Sequence[str],
        states: Mapping[str, str],
        digest: Mapping[str, str],
        body: dict[str, Any],
        request: str | None = None,
    ) -> None:
        """Take sites out: their rows and blobs and all older states go, the last round gets the given ones.

        `body` says more about it. A `request` becomes 'applied' in the same transaction, with `body` as its result.
        Raises LedgerError for a site that is unknown or forgotten, and for a request that does not wait.
        """
        written = {"sites": list(sites), "states": dict(states), "digest": dict(digest), "body": body, "request": request}
        self._change_sites("forgotten", written, sites, {}, request)

    def roll_back(
        self, round: int, sites: Sequence[str], body: dict[str, Any] | None = None, request: str | None = None
    ) -> None:
        """Go back to the state after a round, because of some sites; later rounds and contributions go.

        `body` says more about it and about the request. Raises UserError as `check_roll_back` does.
        """
        self.check_roll_back(round)
        with self._replacing() as db:
            append(db, "rolled back", {"round": round, "sites": list(sites), "body": body, "request": request})

    def check_roll_back(self, round: int) -> None:
        """UserError if the state after a round, or a site's contribution to it, is not kept, or its sum lacks a member."""
        rows = {row.round: row for row in self.rounds()}
        before = (event.body for event in self.events("round") if event.body["round"] <= round)
        gave = {site for body in before for site in body["contributions"]}
        lost = [site for site, gone in self.sites().items() if site in gave and not gone and not any(
            one.round <= round for one in self.history(site))]  # fmt: skip
        if round not in rows or not rows[round].states or lost:
            kept = "federation.history=all keeps it, until a site is forgotten"
            raise UserError(f"{self.folder}: the state after round {round} is not kept ({kept})")
        if self._readmitted_since(round):
            raise UserError(f"{self.folder}: a site was readmitted after round {round}, which is not in its sum")

    def _readmitted_since(self, round: int) -> bool:
        """Whether a site was readmitted after the round was committed (for the last time)."""
        last = self.newest("readmitted")
        return last is not None and not any(event.body["round"] <= round for event in self.events("round", after=last.id))

    def readmit(
        self,
        sites: Sequence[str],
        contributions: Mapping[str, Contribution],
        states: Mapping[str, str],
        digest: Mapping[str, str],
        body: dict[str, Any] | None = None,
        request: str | None = None,
    ) -> None:
        """Take forgotten sites in again, with contributions of committed rounds; otherwise as `forget`."""
        if odd := contributions.keys() - set(sites):
            raise LedgerError(f"site '{min(odd)}' has a contribution but is not among those readmitted ({', '.join(sites)})")
        written = {"sites": list(sites), "states": dict(states), "digest": dict(digest), "body": body, "request": request}
        self._change_sites("readmitted", written, sites, contributions, request)

    def _change_sites(
        self,
        kind: str,
        body: dict[str, Any],
        sites: Sequence[str],
        contributions: Mapping[str, Contribution],
        request: str | None,
    ) -> None:
        self.blobs.settle(_blobs(contributions, body["states"]))
        with self._replacing() as db:
            if not db.execute("SELECT 1 FROM rounds").fetchone():
                raise LedgerError(f"{self.folder}: no round is committed; there is nothing to change")
            check_sites(db, sites, forgotten=kind == "readmitted")
            append(db, kind, body | ({"contributions": _plain(contributions)} if kind == "readmitted" else {}))
            if request is not None:
                check_move(db, request, "applied")
                append(db, "applied", {"id": request, "result": body["body"]})

    # Requests

    def receive(self, id: str, kind: str, sites: Sequence[str], reason: str, options: dict[str, Any]) -> Request:
        """Queue a request; an id that is there already is answered as it stands. Works beside a server, too.

        Raises LedgerError for unknown sites.
        """
        body = {"id": id, "kind": kind, "sites": list(sites), "reason": reason, "options": options}
        with self._database.queueing() as db:
            if not db.execute("SELECT 1 FROM requests WHERE id = ?", (id,)).fetchone():
                check_sites(db, sites)
                append(db, "received", body)
            return Request.of(db.execute(f"{REQUESTS} WHERE id = ?", (id,)).fetchone())

    def set_request(self, id: str, state: str, result: dict[str, Any] | None) -> None:
        """Move a request on: received, applied, verified; or received, refused. Raises LedgerError for other moves."""
        with self._database.transaction() as db:
            check_move(db, id, state)
            append(db, state, {"id": id, "result": result})

    # Nodes

    def bind(self, nodes: Mapping[str, int], by: str = "joined", keys: Mapping[str, str] | None = None) -> None:
        """Note to which node each site's contributions belong from now on, and the digest of its public key if it has one.

        Works beside a server, too.
        """
        with self._database.queueing() as db:
            check_sites(db, nodes)
            append(db, BOUND, {"nodes": dict(nodes), "by": by, **({"keys": dict(keys)} if keys else {})})

    # Events and upkeep

    def note(self, kind: str, body: dict[str, Any]) -> None:
        """Add an event that changes no table. Raises LedgerError for the kinds that do."""
        if kind in WRITING:
            raise LedgerError(f"an event '{kind}' changes the ledger's tables: it cannot be noted")
        with self._database.transaction() as db:
            append(db, kind, body)

    def prune(self) -> list[str]:
        """Remove what a crash left: blobs that no row refers to, and temporaries; their names. Not while sites reply."""
        with self._database.transaction() as db:
            orphans = sorted(self.blobs.names() - referenced(db))
            for blob in orphans:
                self.blobs.remove(blob)
            if self.blobs.elsewhere is not None:
                self.blobs.elsewhere.remove(self.blobs.elsewhere.names() - referenced(db))
            removed = [self.blobs.path(blob).name for blob in orphans] + self.blobs.sweep()
            if removed:
                append(db, "pruned", {"files": removed})
        return removed

    # How it is done

    @contextmanager
    def _replacing(self) -> Iterator[Connection]:
        """A transaction after which the blobs that it left without a reference go."""
        with self._database.transaction() as db:
            watch(db)
            yield db
            gone = unreferenced(db)
        self.blobs.remove_all(gone)


def _plain(contributions: Mapping[str, Contribution]) -> dict[str, dict[str, Any]]:
    return {site: asdict(one) for site, one in contributions.items()}


def _blobs(contributions: Mapping[str, Contribution], states: Mapping[str, str]) -> set[str]:
    return {*(one.blob for one in contributions.values()), *states.values()}
