"""The requests of a ledger: received, begun, cancelled, and moved from state to state.

The folder of the runs has a file with all applied requests. A run that is restored from an older copy has lost such
requests, and receives them again (Ledger.open).
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from fedloom.server.ledger.blobs import LedgerError, ledger_errors
from fedloom.server.ledger.records import REQUESTS, Records
from fedloom.server.ledger.rows import Request, decoded
from fedloom.server.ledger.tables import append, begun, check_move, check_sites, refused
from fedloom.server.run_folder.layout import APPLIED
from fedloom.server.run_folder.listing import applied_to

ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")  # files have it as their name
FIELDS = {"id": str, "kind": str, "sites": list, "reason": str, "options": dict, "by": str}  # of a line in the file
OPTIONS = {"repair": int, "restore": int, "back": float, "retrain": bool, "rollback": bool, "recalibrate": bool}


class RequestQueue(Records):
    """The part of a ledger that queues requests. `receive` and `cancel` work while a server runs."""

    def receive(
        self, id: str, kind: str, sites: Sequence[str], reason: str, options: dict[str, Any], by: str = "",
        alone: bool = False,
    ) -> Request:  # fmt: skip
        """Queue a request and return it; for a known id, return the existing request. Works while a server runs.

        `by`: who sent it. `alone`: refuse it if another request for one of the sites is open. Raises LedgerError then, and
        if a site is unknown.
        """
        body = {"id": id, "kind": kind, "sites": list(sites), "reason": reason, "options": options}
        body |= {"by": by} if by else {}
        with self._database.queueing() as db:
            if not db.execute("SELECT 1 FROM requests WHERE id = ?", (id,)).fetchone():
                check_sites(db, sites)
                if alone:
                    _check_alone(db, sites)
                append(db, "received", body)
            return Request.of(db.execute(f"{REQUESTS} WHERE id = ?", (id,)).fetchone())

    def set_request(self, id: str, state: str, result: dict[str, Any] | None) -> None:
        """Move a request to its next state: from received to applied to verified, or from received to refused.

        A refused request may be refused again; nothing changes. Raises LedgerError for other moves.
        """
        with self._database.transaction() as db:
            if state == "refused" and refused(db, id):
                return
            check_move(db, id, state)
            append(db, state, {"id": id, "result": result})

    def begin(self, id: str, kind: str, body: dict[str, Any]) -> bool:
        """Note that the server begins to apply a request, unless it was cancelled. Return whether it was not.

        `kind`: one of BEGUN. From here on, the request cannot be cancelled.
        """
        with self._database.transaction() as db:
            if refused(db, id):
                return False
            append(db, kind, {"request": id, **body})
        return True

    def cancel(self, id: str, by: str) -> Request:
        """Refuse a waiting request because `by` withdraws it, and return it. Works while a server runs.

        Raises LedgerError if the server has begun to apply it, or it does not wait.
        """
        with self._database.queueing() as db:
            _check_waits(db, id)
            append(db, "refused", {"id": id, "result": {"reason": f"cancelled by {by}", "cancelled": by}})
            return Request.of(db.execute(f"{REQUESTS} WHERE id = ?", (id,)).fetchone())

    def lost(self) -> list[dict[str, Any]]:
        """Return the applied requests that this ledger lacks, because it is restored from an older copy.

        Each has the arguments of `receive`, without sites that are forgotten here.
        """
        forgotten, found = self.sites(), {}
        for row in _applied_to(self.folder, self.run().run):
            row["sites"] = [site for site in row["sites"] if not forgotten.get(site, True)]
            if row["sites"] and self.request(row["id"]) is None:
                found[row["id"]] = row
        return list(found.values())

    def receive_lost(self) -> None:
        """Queue the requests that the run had applied before it was restored from an older copy."""
        for lost in self.lost():
            self.receive(**lost)


def _check_waits(db: Connection, id: str) -> None:
    """Raise LedgerError unless the request exists, and may still be cancelled."""
    row = db.execute(f"{REQUESTS} WHERE id = ?", (id,)).fetchone()
    known = Request.of(row) if row else None
    if known and known.state == "refused":
        result = known.result or {}
        if by := result.get("cancelled"):
            raise LedgerError(f"request '{id}': is already cancelled, by {by}")
        raise LedgerError(f"request '{id}': is already refused, so it cannot be cancelled: {result.get('reason')}")
    if known and known.state != "received":
        raise LedgerError(f"request '{id}': is already {known.state}, so it cannot be cancelled")
    check_move(db, id, "refused")
    if begun(db, id):
        raise LedgerError(f"request '{id}': the server has begun to apply it, so it cannot be cancelled")


def _check_alone(db: Connection, sites: Sequence[str]) -> None:
    """Raise LedgerError if a request for one of the sites is open."""
    for id, named in db.execute("SELECT id, sites FROM requests WHERE state IN ('received', 'applied')"):
        if not set(sites).isdisjoint(decoded(named)):
            raise LedgerError(f"The request '{id}' for the same site is open: wait for it, or cancel it.")


def note_applied(folder: Path, run: str, request: Request) -> None:
    """Add a request of a run to the file. Raises LedgerError if it cannot be written.

    Args:
        folder: The run's folder. Copies under other names do not receive its requests.
        run: The run's id.
        request: The request that is being applied.
    """
    path = folder.resolve().with_name(APPLIED)
    facts = {"id": request.id, "kind": request.kind, "sites": list(request.sites), "reason": request.reason}
    entry = {"run": run, "folder": folder.resolve().name, **facts, "options": request.options, "by": request.by}
    with ledger_errors(path):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(entry)}\n")  # the first line break ends a line that a crash tore
            file.flush()
            os.fsync(file.fileno())


def _applied_to(folder: Path, run: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which the ledger of the run received each applied request, oldest first."""
    path = folder.resolve().with_name(APPLIED)
    with ledger_errors(path):
        lines = list(applied_to(folder, run))
    for number, entry in lines:
        if not _is_request(entry):
            raise LedgerError(f"{path}: line {number} is not a request; restore the file from a copy, or remove the line")
        yield entry


def _is_request(entry: dict[str, Any]) -> bool:
    """Return whether a line of the file has the fields of a request, and an id that can name files."""
    typed = entry.keys() == FIELDS.keys() and all(isinstance(entry[name], kind) for name, kind in FIELDS.items())
    if not (typed and all(isinstance(site, str) for site in entry["sites"]) and ID.fullmatch(entry["id"])):
        return False
    return all(
        name in OPTIONS and isinstance(value, OPTIONS[name]) and value >= 0 for name, value in entry["options"].items()
    )
