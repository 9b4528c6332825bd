"""Which masks are in the stored contributions (server.rounds.secure_aggregation), according to the rounds' records."""

import itertools
from collections.abc import Mapping, Sequence

from fedloom.server.ledger import Ledger

RECORD = "masked"  # key of a round's record in the ledger: which sites share masks

_Masked = tuple[int, int, set[str]]  # a round: its number, its number for the sites, the sites that count


def _without(rounds: Sequence[_Masked], removed: Sequence[str]) -> list[_Masked]:
    return [(number, at, sites - set(removed)) for number, at, sites in rounds]


def partners(together: Mapping[frozenset[str], object], leaving: Sequence[str]) -> list[str]:
    """Return the remaining sites that share masks with leaving ones. `together`: as from `rounds_together`."""
    others = {name for pair in together if pair & set(leaving) for name in pair}
    return sorted(others - set(leaving))


def rounds_together(ledger: Ledger) -> dict[frozenset[str], list[int]]:
    """Return, by pair of sites, the rounds (as sites number them) whose shared masks are in their stored contributions.

    Forgotten sites are in no pair.
    """
    rounds: list[_Masked] = []
    for event in ledger.events():
        if event.kind == "round" and (record := (event.body.get("record") or {}).get(RECORD)):
            rounds = _without(rounds, record["lifted"])
            rounds.append((event.body["round"], record["round"], set(record["sites"])))
        elif event.kind == "rolled back":
            rounds = [masked for masked in rounds if masked[0] <= event.body["round"]]
        elif event.kind == "forgotten":
            rounds = _without(rounds, event.body["sites"])
    pairs: dict[frozenset[str], list[int]] = {}
    for _, at, sites in rounds:
        for pair in itertools.combinations(sorted(sites), 2):
            pairs.setdefault(frozenset(pair), []).append(at)
    return pairs
