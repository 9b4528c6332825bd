"""Map the layers of one network to the layers of another, and draw the costs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom.conf.errors import unknown
from fedloom.conf.progress import under_way
from fedloom.fusion.cla_ot.matching import layer_costs, match_units
from fedloom.fusion.graph.channels import wire
from fedloom.sims.operations.network_files import NetworkFiles, check_out
from fedloom.sims.report.plots import alignment_figure
from fedloom.sims.report.tables import Table

COMPARISONS = ("cka", "wasserstein", "neurons")
PICTURES = (".png", ".pdf", ".svg")


def align(files: NetworkFiles, comparison: str, pin_first: bool, pin_last: bool, out: Path) -> Table:
    """Map layers of one network to another's; draw the costs and the map to `out`, and return the map as a table.

    `comparison`: the measure of similarity. `pin_first`, `pin_last`: force the first, the last layers to match.
    """
    check_out(out, PICTURES)
    if comparison not in COMPARISONS:
        raise unknown("--comparison", comparison, COMPARISONS)
    (a, b), _, probe = files.load()
    with under_way("comparing layers"), files.named_in_errors():
        first, second = wire(a, probe[:1]), wire(b, probe[:1])
        kind = {"neurons": {"representation": "neurons"}}.get(comparison, {"dissimilarity": comparison})
        cost = layer_costs(a, b, probe, **kind)
        pairs = match_units(first, second, cost, pin_first=pin_first, pin_last=pin_last)
    own, other = ([unit.name for unit in each.units] for each in (first, second))
    alignment_figure(cost, own, other, pairs, [unit.group for unit in first.units], files.shown, out)
    rows = [[index, u.name, *_partner(index, pairs, second.units, cost), u.group] for index, u in enumerate(first.units)]
    head = ["#", files.shown[0], f"layer of {files.shown[1]}", "cost", "group"]
    total = sum(cost[i, j] for i, j in pairs.items())
    note = f"{comparison} over {len(probe)} samples of {files.domain}; cost of the map {total:.4f}"
    return Table("Alignment", head, rows, ". ".join(filter(None, [note, files.few(probe)])))


def _partner(index: int, pairs: dict[int, int], units: Sequence, cost: np.ndarray) -> list[str]:
    if index not in pairs:
        return ["-", "-"]
    return [units[pairs[index]].name, f"{cost[index, pairs[index]]:.4f}"]
