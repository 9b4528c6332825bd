"""The durable record of a run: contributions, requests, and all events in a hash chain.

A ledger is one SQLite file, with the states next to it in `blobs/`. A committed change survives any crash; of an uncommitted
one, nothing remains.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.server.ledger.blobs import LedgerError, ledger_errors
from fedloom.server.ledger.database import LEDGER, acquire, make, unlock
from fedloom.server.ledger.records import BOUND
from fedloom.server.ledger.request_queue import RequestQueue, note_applied
from fedloom.server.ledger.rows import Contribution
from fedloom.server.ledger.sums import ONE
from fedloom.server.ledger.tables import (
    FORMAT,
    REPLACED,
    THINNED,
    WITH_STATES,
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


class Ledger(RequestQueue):
    """The ledger in a run's folder: `create` or `open` it. As a context manager, it is closed at the end."""

    @classmethod
    def create(
        cls, folder: Path, run: str, config: str, bits: int, sites: Sequence[str], sums: Mapping[str, Any] = ONE,
        slots: Sequence[str] | None = None, lock: int | None = None,
    ) -> "Ledger":  # fmt: skip
        """Create a ledger and become its one server.

        Args:
            folder: The run's folder.
            run: The run's id.
            config: The text of config.yaml.
            bits: Sums count in units of 2**-bits.
            sites: The names of the sites.
            sums: The method's sums, as the first event stores them (server.ledger.sums).
            slots: The names of all its slots.
            lock: The folder's lock, if the caller has it (`acquire`); this function releases it if it fails.

        Raises:
            LedgerError: The ledger exists, another server has the folder, or the folder cannot be written.
        """
        try:
            check_repeated(sites)
            with ledger_errors(Path(folder)):
                Path(folder).mkdir(parents=True, exist_ok=True)
            lock = acquire(Path(folder)) if lock is None else lock  # before anything is written
            make(Path(folder) / LEDGER)
        except BaseException:
            if lock is not None:
                unlock(lock)
            raise
        ledger = cls(folder, True, lock)
        body = {"run": run, "config": config, "bits": bits, "format": FORMAT, "sites": list(sites), "sums": dict(sums)}
        body |= {} if slots is None else {"slots": list(slots)}
        try:
            with ledger_errors(ledger.blobs.folder):
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
        """Open the ledger of a folder, as its one server or as a reader.

        A reader can also queue requests while a server runs. Raises LedgerError if the ledger is missing, has another
        format, or another server has it open.
        """
        if not (Path(folder) / LEDGER).is_file():
            raise LedgerError(f"{folder}: has no ledger ({LEDGER}); name the folder of a run that has one")
        ledger = cls(folder, server)
        try:
            ledger._check_format()
            if server:
                with ledger._database.transaction():
                    pass  # removes the seal, and fails now if nothing can be written
                ledger.receive_lost()
        except BaseException:
            ledger._database.close()
            raise
        return ledger

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, UserError):  # nothing is half done, and this error matters more than the seal's
            with suppress(UserError, OSError):
                self.close()
        else:
            self._database.close()

    def close(self) -> None:
        """Close the ledger. A server first merges its log and writes ledger.sha256. Closing twice is harmless."""
        try:
            self._database.seal()
        finally:
            self._database.close()

    def in_place(self) -> bool:
        """Return whether this server's folder is still in its place: another run's may have replaced it."""
        return self._database.in_place()

    def refuse_moved(self) -> None:
        """Raise LedgerError unless the folder is in its place (`in_place`)."""
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
        """Commit a round whose blobs exist. If it fails, nothing is written.

        Args:
            round: The round's number; 0: the start.
            contributions: By site, its contribution in this round.
            states: By name, the digests of the sums and of the server's states.
            digest: By slot, the digest of the exact sum.
            record: The round's line of metrics.jsonl.
            keep: "latest" (remove replaced blobs) or "all".

        Raises:
            LedgerError: The round is not the next one, a site is unknown or forgotten, a blob is missing, or the disk fails.
        """
        body = {"round": round, "contributions": _plain(contributions), "states": dict(states), "digest": dict(digest)}
        if keep not in ("latest", "all"):
            raise LedgerError(f"round {round}: keep must be 'latest' or 'all', not '{keep}'")
        if wrong := {contribution.round for contribution in contributions.values()} - {round}:
            raise LedgerError(f"round {round}: a contribution belongs to round {min(wrong)}; commit each in its own round")
        self.blobs.flush(_blobs(contributions, states))
        with self._replacing() as db:
            check_round(db, round)
            check_sites(db, contributions, forgotten=False)
            append(db, "round", {**body, "record": record, "keep": keep})

    def extend(self, before: str, config: str) -> None:
        """Replace the text of config.yaml, `before`, by one with more rounds."""
        with self._database.transaction() as db:
            append(db, "extended", {"before": before, "config": config})

    def extended(self) -> int:
        """Return the last round before the run received more rounds for the last time; 0: it never did."""
        last = found = 0
        for event in self.events():
            last = event.body["round"] if event.kind in ("round", "rolled back") else last
            found = last if event.kind == "extended" else found
        return found

    # Forgetting

    def forget(
        self,
        sites: Sequence[str],
        states: Mapping[str, str],
        digest: Mapping[str, str],
        body: dict[str, Any],
        request: str | None = None,
    ) -> None:
        """Remove sites: their rows and blobs, and all older states. The last round gets `states` and `digest`.

        `body`: further facts for the event. `request` becomes 'applied' in the same transaction, with `body` as its result.
        Raises LedgerError if a site is unknown or forgotten, or the request is not waiting.
        """
        if request is not None and (row := self.request(request)) is not None:
            note_applied(self.folder, self.run().run, row)
        written = {"sites": list(sites), "states": dict(states), "digest": dict(digest), "body": body, "request": request}
        self._change_sites("forgotten", written, sites, {}, request)

    def roll_back(
        self, round: int, sites: Sequence[str], body: dict[str, Any] | None = None, request: str | None = None
    ) -> None:
        """Go back to the state after a round, because of some sites. Later rounds and contributions are removed.

        `body` has further facts for the event of the request. Raises UserError as `check_roll_back` does.
        """
        self.check_roll_back(round)
        with self._replacing() as db:
            append(db, "rolled back", {"round": round, "sites": list(sites), "body": body, "request": request})

    def check_roll_back(self, round: int) -> None:
        """Check that the run can go back to the state after a round.

        Raises UserError if that state, or a site's contribution to it, is not stored, or its sum lacks a member.
        """
        rows = {row.round: row for row in self.rounds()}
        before = (event.body for event in self.events("round") if event.body["round"] <= round)
        gave = {site for body in before for site in body["contributions"]}
        lost = [site for site, forgotten in self.sites().items() if site in gave and not forgotten and not any(
            contribution.round <= round for contribution in self.history(site))]  # fmt: skip
        if round not in rows or not rows[round].states or lost:
            hint, thinned = "federation.history=all stores it, until a site is forgotten", self.newest(THINNED)
            if thinned is not None and round < thinned.body["round"]:
                hint = f"it was removed on {thinned.time[:10]}, with all before round {thinned.body['round']}"
            raise UserError(f"{self.folder}: the state after round {round} is not stored ({hint})")
        if self._readmitted_since(round):
            raise UserError(f"{self.folder}: a site was readmitted after round {round}; the sum of that round is without it")

    def _readmitted_since(self, round: int) -> bool:
        """Return whether a site was readmitted after the round was last committed."""
        last = self.newest("readmitted")
        return last is not None and not any(event.body["round"] <= round for event in self.events("round", after=last.id))

    def readmit(
        self,
        sites: Sequence[str],
        contributions: Mapping[str, Contribution],
        states: Mapping[str, str],
        digest: Mapping[str, str],
    ) -> None:
        """Readmit forgotten sites.

        Args:
            sites: The sites.
            contributions: By site, the contribution of a committed round with which it starts.
            states: By name, the digests of the sums and of the server's states with these sites.
            digest: By slot, the digest of the exact sum.

        Raises:
            LedgerError: A site is not forgotten, or a blob is missing.
        """
        if unnamed := contributions.keys() - set(sites):
            raise LedgerError(
                f"site '{min(unnamed)}' has a contribution but is not among the readmitted sites ({', '.join(sites)})"
            )
        written = {"sites": list(sites), "states": dict(states), "digest": dict(digest), "body": None, "request": None}
        self._change_sites("readmitted", written, sites, contributions, None)

    def _change_sites(
        self,
        kind: str,
        body: dict[str, Any],
        sites: Sequence[str],
        contributions: Mapping[str, Contribution],
        request: str | None,
    ) -> None:
        self.blobs.flush(_blobs(contributions, body["states"]))
        with self._replacing() as db:
            if not db.execute("SELECT 1 FROM rounds").fetchone():
                raise LedgerError(f"{self.folder}: no round is committed yet, so there is nothing to change")
            check_sites(db, sites, forgotten=kind == "readmitted")
            append(db, kind, body | ({"contributions": _plain(contributions)} if kind == "readmitted" else {}))
            if request is not None:
                check_move(db, request, "applied")
                append(db, "applied", {"id": request, "result": body["body"]})

    # Nodes

    def bind(self, nodes: Mapping[str, int], by: str = "joined", keys: Mapping[str, str] | None = None) -> None:
        """From now on, bind each site's contributions to its node, and to the digest of its public key if it has one.

        `by`: the cause. Works while a server runs.
        """
        with self._database.queueing() as db:
            check_sites(db, nodes)
            append(db, BOUND, {"nodes": dict(nodes), "by": by, **({"keys": dict(keys)} if keys else {})})

    # Events and upkeep

    def note(self, kind: str, body: dict[str, Any]) -> None:
        """Add an event that changes no table. Raises LedgerError for the kinds of event that do."""
        if kind in WRITING:
            raise LedgerError(f"an event '{kind}' changes the ledger's tables; `note` cannot add it")
        with self._database.transaction() as db:
            append(db, kind, body)

    def thin(self, before: int) -> int:
        """Remove what only going back to a round before this one needs. Return the number of removed files.

        Every site's last contribution stays, and the last round's states.
        """
        last = self.last_round()
        before = min(before, last.round) if last else 0
        files = self.blobs.names()
        old = f"SELECT 1 FROM contributions {REPLACED} UNION ALL SELECT 1 FROM rounds {WITH_STATES} LIMIT 1"
        if self._query(old, before, before):
            with self._replacing() as db:
                append(db, THINNED, {"round": before})
        return len(files - self.blobs.names())

    def prune(self) -> list[str]:
        """Remove blobs that no row refers to, and temporary files; return their names. Do not call it while sites reply."""
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

    # Helpers

    @contextmanager
    def _replacing(self) -> Iterator[Connection]:
        """Run a transaction, then remove the blobs to which it left no reference."""
        with self._database.transaction() as db:
            watch(db)
            yield db
            unused = unreferenced(db)
        self.blobs.remove_all(unused)


def _plain(contributions: Mapping[str, Contribution]) -> dict[str, dict[str, Any]]:
    return {site: asdict(contribution) for site, contribution in contributions.items()}


def _blobs(contributions: Mapping[str, Contribution], states: Mapping[str, str]) -> set[str]:
    return {*(contribution.blob for contribution in contributions.values()), *states.values()}
