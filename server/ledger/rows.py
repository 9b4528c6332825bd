"""The rows of a ledger, as dataclasses."""

from dataclasses import dataclass
from typing import Any

from fedloom.conf.yaml_text import read_json
from fedloom.server.ledger.blobs import LedgerError
from fedloom.server.run_folder.layout import LEDGER

STATES = ("received", "applied", "verified", "refused")  # of a request
MOVES = (("received", "applied"), ("applied", "verified"), ("received", "refused"))  # of a request, between states


@dataclass(frozen=True)
class Contribution:
    """The record of what a site contributed in a round.

    `blob`: the digest of its tensors, which are summed in units of 2**-bits. `samples`: how many it trained on.
    """

    blob: str
    samples: int
    round: int
    bits: int


@dataclass(frozen=True)
class RoundRow:
    """A committed round.

    Attributes:
        round: Its number; 0: the start.
        time: The time of the commit.
        record: Its line of metrics.jsonl.
        states: The digests of the sums and of the server's states, by name; empty once a later commit replaced them.
        digest: The digests of the exact sums, by slot.
    """

    round: int
    time: str
    record: dict[str, Any] | None
    states: dict[str, str]
    digest: dict[str, str]

    @classmethod
    def of(cls, row: tuple) -> "RoundRow":
        """Return the round in a row of the table."""
        round, time, record, states, digest = row
        tables = decoded(states, dict), decoded(digest, dict)
        return cls(round, time, None if record is None else decoded(record, dict), *tables)


@dataclass(frozen=True)
class RunRow:
    """The run of a ledger. `config`: the text of config.yaml. `bits`: sums count in units of 2**-bits."""

    run: str
    config: str
    bits: int
    created: str
    format: int


@dataclass(frozen=True)
class Request:
    """A request to the server, such as to forget sites.

    Attributes:
        id: The request's id.
        kind: What to do.
        sites: The sites that it names.
        reason: The reason that the user wrote.
        options: The options, such as repair rounds.
        state: One of those in MOVES, such as "received".
        result: The result; None before the request is applied.
        by: The name of the one who sent it; may be empty.
    """

    id: str
    kind: str
    sites: tuple[str, ...]
    reason: str
    options: dict[str, Any]
    state: str
    result: dict[str, Any] | None
    by: str = ""

    @classmethod
    def of(cls, row: tuple) -> "Request":
        """Return the request in a row of the table."""
        id, kind, sites, reason, options, state, result, by = row
        named, answer = decoded(sites, list), None if result is None else decoded(result, dict)
        if odd := [text for text in (id, kind, reason, state, by or "", *named) if not isinstance(text, str)]:
            raise _damaged(odd[0])
        return cls(id, kind, tuple(named), reason, decoded(options, dict), state, answer, by or "")


def decoded(text: str, kind: type = object) -> Any:
    """Return the value of a JSON text in a row, of this `kind`. Raises LedgerError if the row is damaged."""
    try:
        value = read_json(text)
    except (TypeError, ValueError, RecursionError):
        raise _damaged(text) from None
    if not isinstance(value, kind):
        raise _damaged(text)
    return value


def _damaged(content: object) -> LedgerError:
    return LedgerError(f"{LEDGER}: is damaged: a row has {str(content)[:40]!a}; restore it from a copy of the run")
