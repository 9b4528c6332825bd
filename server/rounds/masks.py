"""Which sites' masks are in what is kept of each other (server.rounds.secure_aggregation): the rounds' records say so."""

import itertools
from collections.abc import Mapping, Sequence

from fedloom.server.ledger import Ledger

RECORD = "masked"  # of a round's record in the ledger: which sites' masks are in what is kept of each other

_Masked = tuple[int, int, set[str]]  # a round: its number, the sites' number of it, the sites that count


def _without(rounds: Sequence[_Masked], gone: Sequence[str]) -> list[_Masked]:
    return [(number, at, sites - set(gone)) for number, at, sites in rounds]


def partners(together: Mapping[frozenset[str], object], leaving: Sequence[str]) -> list[str]:
    """The sites that stay and have masks in common with those that leave."""
    others = {name for pair in together if pair & set(leaving) for name in pair}
    return sorted(others - set(leaving))


def rounds_together(ledger: Ledger) -> dict[frozenset[str], list[int]]:
    """By two sites, the sites' rounds of which what is kept of both holds their common mask; forgotten sites are in none."""
    rounds: list[_Masked] = []
    for event in ledger.events():
        if event.kind == "round" and (record := (event.body.get("record") or {}).get(RECORD)):
            rounds = _without(rounds, record["lifted"])
            rounds.append((event.body["round"], record["round"], set(record["sites"])))
        elif event.kind == "rolled back":
            rounds = [one for one in rounds if one[0] <= event.body["round"]]
        elif event.kind == "forgotten":
            rounds = _without(rounds, event.body["sites"])
    found: dict[frozenset[str], list[int]] = {}
    for _, at, sites in rounds:
        for pair in itertools.combinations(sorted(sites), 2):
            found.setdefault(frozenset(pair), []).append(at)
    return found
