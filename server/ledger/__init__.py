"""The durable record of a run: events in a chain, tables that follow from them, states in files, and what checks them."""

from fedloom.server.ledger.blobs import LedgerError
from fedloom.server.ledger.ledger import Ledger
from fedloom.server.ledger.rows import Contribution, Request, RoundRow, RunRow

__all__ = ["Contribution", "Ledger", "LedgerError", "Request", "RoundRow", "RunRow"]
