"""What the ledger alone says of a method's sums: which there are, and what they are, read again from the contributions."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.fusion.exact import ExactSum, exact
from fedloom.fusion.state import State
from fedloom.server.ledger.rows import Contribution

ONE = {"sum": {"prefix": "", "weighted": False}}  # in ledgers that do not say it


@dataclass(frozen=True)
class SumRow:
    """A slot that is summed: what stands before its tensors' names in contributions, whether samples are weights.

    `masked`: contributions are masked (secure aggregation), and their sum is one modulo 2**64, in which masks cancel.
    """

    name: str
    prefix: str
    weighted: bool
    masked: bool = False

    def of(self, whole: State, names: Iterable[str], bits: int) -> State:
        """What a contribution has of these tensors (int64); empty if the site has put nothing into the slot."""
        here = {name: whole[self.prefix + name] for name in names if self.prefix + name in whole}
        return exact(here, bits)

    def times(self, samples: int) -> int:
        """How many times a contribution of so many samples counts."""
        return max(1, samples) if self.weighted else 1


def sum_rows(created: Mapping[str, Any], states: Mapping[str, str]) -> list[SumRow]:
    """The sums of a ledger whose first event says this and that keeps these states now."""
    return [SumRow(name, **parts) for name, parts in created.get("sums", ONE).items() if name in states]


def added_up(
    row: SumRow, names: Iterable[str], contributions: Iterable[Contribution], read: Callable[[str], State], bits: int
) -> ExactSum:
    """The sum of these tensors over contributions, read one after the other; those that are one file once."""
    total, names = ExactSum(bits, modular=True), list(names)  # whatever the order, no partial sum is too large
    for (blob, times), count in Counter((one.blob, row.times(one.samples)) for one in contributions).items():
        if part := row.of(read(blob), names, bits):
            total.add(part, times * count)
    return total
