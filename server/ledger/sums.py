"""The sums of a method, as the ledger alone describes them, and how to add them up again from the contributions."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.fusion.exact import ExactSum, exact
from fedloom.fusion.state import State
from fedloom.server.ledger.rows import Contribution

ONE = {"sum": {"prefix": "", "weighted": False}}  # in ledgers of earlier versions, which do not say it


@dataclass(frozen=True)
class SumRow:
    """The ledger's description of a summed slot.

    `prefix`: stands before its tensors' names in contributions. `weighted`: samples are weights. `masked`: contributions are
    masked (secure aggregation); their sum is modulo 2**64, where masks cancel.
    """

    name: str
    prefix: str
    weighted: bool
    masked: bool = False

    def of(self, contribution: State, names: Iterable[str], bits: int) -> State:
        """Return a contribution's tensors of these names in this slot, as int64; empty if it has put nothing there."""
        part = {name: contribution[self.prefix + name] for name in names if self.prefix + name in contribution}
        return exact(part, bits)

    def times(self, samples: int) -> int:
        """Return how often a contribution of `samples` samples counts in the sum."""
        return max(1, samples) if self.weighted else 1


def sum_rows(created: Mapping[str, Any], states: Mapping[str, str]) -> list[SumRow]:
    """Return descriptions of a ledger's sums. `created`: its first event's body. `states`: the current ones, by name."""
    return [SumRow(name, **parts) for name, parts in created.get("sums", ONE).items() if name in states]


def added_up(
    row: SumRow, names: Iterable[str], contributions: Iterable[Contribution], read: Callable[[str], State], bits: int
) -> ExactSum:
    """Return the sum of a slot's tensors over contributions, read one by one. A file that sites share is read once."""
    total, names = ExactSum(bits, modular=True), list(names)  # in any order, no partial sum overflows
    for (blob, times), count in Counter(
        (contribution.blob, row.times(contribution.samples)) for contribution in contributions
    ).items():
        if part := row.of(read(blob), names, bits):
            total.add(part, times * count)
    return total
