"""The requests of a ledger: received, begun, cancelled, and moved from state to state."""

from collections.abc import Sequence
from typing import Any

from fedloom.server.ledger.blobs import LedgerError
from fedloom.server.ledger.records import REQUESTS, Records
from fedloom.server.ledger.rows import Request
from fedloom.server.ledger.tables import append, begun, check_move, check_sites, refused


class RequestQueue(Records):
    """The part of a ledger that queues requests. `receive` and `cancel` work while a server runs."""

    def receive(
        self, id: str, kind: str, sites: Sequence[str], reason: str, options: dict[str, Any], by: str = ""
    ) -> Request:
        """Queue a request and return it; for a known id, return the existing request. Works while a server runs.

        `by`: who sent it. Raises LedgerError if a site is unknown.
        """
        body = {"id": id, "kind": kind, "sites": list(sites), "reason": reason, "options": options}
        body |= {"by": by} if by else {}
        with self._database.queueing() as db:
            if not db.execute("SELECT 1 FROM requests WHERE id = ?", (id,)).fetchone():
                check_sites(db, sites)
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
            check_move(db, id, "refused")
            if begun(db, id):
                raise LedgerError(f"request '{id}': the server has begun to apply it, so it cannot be cancelled")
            append(db, "refused", {"id": id, "result": {"reason": f"cancelled by {by}", "cancelled": by}})
            return Request.of(db.execute(f"{REQUESTS} WHERE id = ?", (id,)).fetchone())
