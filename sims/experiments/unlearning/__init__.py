"""Ways to forget a site side by side, and what each leaves behind.

`ways`: on rotated_digits, at its size. The others: small federations of embedded digits (shadows), of which an attack that
is fitted to single images takes many.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fedloom.conf.errors import UserError
from fedloom.sims.experiments.table_files import chosen, write
from fedloom.sims.experiments.unlearning import methods, sequence, traces
from fedloom.sims.report.tables import Table

SHADOWS = 8  # federations of an attack that is fitted to single images
SMALL: dict[str, Callable[[Path, int], list[Table]]] = {
    "traces": lambda folder, seeds: traces.tables(folder, max(seeds, SHADOWS)),
    "sequence": sequence.tables,
}
WAYS = "ways"


def reproduce(preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
    """Write the tables (tables=traces,sequence: these alone); what is on disk is taken as it is.

    Other overrides are for the runs of `ways`. Returns the folder. Raises UserError for another preset or table.
    """
    if preset != "cpu":
        raise UserError("reproduce unlearning: takes --preset cpu")
    names, rest = chosen("tables", overrides, [WAYS, *SMALL])
    torch.set_num_threads(1)
    tables = list[Table]()
    for name in names or [WAYS, *SMALL]:
        tables += SMALL[name](methods.ROOT / "small", seeds) if name in SMALL else methods.tables(seeds, rest, quiet=quiet)
        write(methods.ROOT, "Ways to remove a site", "", tables)  # what there is so far
    return methods.ROOT
