"""What a ledger holds, as it is given to those who ask."""

import json
from dataclasses import dataclass
from typing import Any

MOVES = (("received", "applied"), ("applied", "verified"), ("received", "refused"))  # of a request, from state to state


@dataclass(frozen=True)
class Contribution:
    """What a site gave in a round: a blob of integers in units of 2**-bits, learned from so many samples."""

    blob: str
    samples: int
    round: int
    bits: int


@dataclass(frozen=True)
class RoundRow:
    """A committed round. `states` are digests of blobs, by name; empty once a later commit has replaced them."""

    round: int
    time: str
    record: dict[str, Any] | None
    states: dict[str, str]
    digest: dict[str, str]

    @classmethod
    def of(cls, row: tuple) -> "RoundRow":
        """From a row of the table."""
        round, time, record, states, digest = row
        return cls(round, time, None if record is None else json.loads(record), json.loads(states), json.loads(digest))


@dataclass(frozen=True)
class RunRow:
    """The run that a ledger belongs to."""

    run: str
    config: str
    bits: int
    created: str
    format: int


@dataclass(frozen=True)
class Request:
    """Something asked of the server, in one of the states of MOVES."""

    id: str
    kind: str
    sites: tuple[str, ...]
    reason: str
    options: dict[str, Any]
    state: str
    result: dict[str, Any] | None

    @classmethod
    def of(cls, row: tuple) -> "Request":
        """From a row of the table."""
        id, kind, sites, reason, options, state, result = row
        answer = None if result is None else json.loads(result)
        return cls(id, kind, tuple(json.loads(sites)), reason, json.loads(options), state, answer)
