"""The durable record of a run: events in a chain, tables that follow from them, states in files, and what checks them."""

from server.ledger.blobs import LedgerError
from server.ledger.ledger import Ledger
from server.ledger.rows import Contribution, Request, RoundRow, RunRow

__all__ = ["Contribution", "Ledger", "LedgerError", "Request", "RoundRow", "RunRow"]
