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
    """The ledger's description of a slot that is summed.

    Attributes:
        name: The slot's name.
        prefix: The prefix of its tensors' names in contributions.
        weighted: Whether a site's samples are its weight.
        masked: Whether contributions are masked (secure aggregation). Their sum is modulo 2**64, where masks cancel.
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
    """Return the exact sum of a slot over contributions, which are read one by one.

    Args:
        row: The description of the slot.
        names: The names of the slot's tensors.
        contributions: The contributions to add. A file that several sites share is read once.
        read: Returns the tensors of a contribution's file, from its digest.
        bits: One unit of the sum is 2**-bits.
    """
    total, names = ExactSum(bits, modular=True), list(names)  # in any order, no partial sum overflows
    for (blob, times), count in Counter(
        (contribution.blob, row.times(contribution.samples)) for contribution in contributions
    ).items():
        if part := row.of(read(blob), names, bits):
            total.add(part, times * count)
    return total
