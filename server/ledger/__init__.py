"""The durable record of a run: chained events, tables derived from them, states in files, and the check of all of these."""

from fedloom.server.ledger.blobs import LedgerError
from fedloom.server.ledger.ledger import Ledger
from fedloom.server.ledger.rows import Contribution, Request, RoundRow, RunRow

__all__ = ["Contribution", "Ledger", "LedgerError", "Request", "RoundRow", "RunRow"]
