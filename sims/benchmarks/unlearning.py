"""Seconds to remove a site, against the number of sites and the size of what they gave."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fedloom.clients.objectives import resolve
from fedloom.conf import load
from fedloom.server.ledger.membership import Membership
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.view import Setup
from fedloom.sims.report.tables import Table

CASES = {"100 sites of 4 MB": (100, 3.75), "100 sites of 0.3 MB": (100, 1.0), "1,000 sites of 0.3 MB": (1000, 1.0)}
REPEATS = 5
MOST_SECONDS, MOST_GROWTH = 1.0, 1.5


def bench() -> tuple[list[Table], list[dict[str, Any]]]:
    """Every case in a folder of its own; medians over a few sites that are removed one after the other."""
    rows = []
    for name, (sites, width) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"case": name, **measure(sites, width, Path(folder))})
    parts = ("subtract_s", "commit_s", "total_s")
    lines = [[row["case"], f"{row['state_mb']:.2f}", *(f"{row[part]:.3f}" for part in parts)] for row in rows]
    growth = rows[2]["total_s"] / rows[1]["total_s"]
    note = (
        f"Medians of {REPEATS} sites. Commit: the new sum's blob, one transaction, the site's blobs deleted. Bars: at most "
        f"{MOST_SECONDS:g} s, and 1,000 sites at most {MOST_GROWTH} times 100 (here {growth:.2f})."
    )
    return [Table("Removing a site, seconds", ["case", "state, MiB", "subtract", "commit", "all"], lines, note)], rows


def measure(sites: int, width: float, folder: Path) -> dict[str, float]:
    """Seconds of the subtraction, of the commit, and of both."""
    entry = f"sites=[{{domain: digits, count: {sites}, partition: {{min_samples: 1}}}}]"
    config = load("digits", [entry, f"network.width={width}", "objective.initialisation=own", f"run.root={folder}"])
    aggregation = ServerState(Setup(resolve(config), config.roster, folder))
    size = sum(tensor.numel() * tensor.element_size() for tensor in aggregation.aggregate().state.values())
    parts = [removal(aggregation, site.name) for site in config.roster[:REPEATS]]
    aggregation.ledger.close()
    subtract, commit, total = map(statistics.median, zip(*((*both, sum(both)) for both in parts), strict=True))
    return {"state_mb": size / 2**20, "subtract_s": subtract, "commit_s": commit, "total_s": total}


def removal(aggregation: ServerState, site: str) -> tuple[float, float]:
    """Seconds of both parts of one and the same removal: a contribution that was read before is not read again."""
    marks = [time.perf_counter()]
    membership = Membership(aggregation.slots, settle=lambda: marks.append(time.perf_counter()))  # called between them
    membership.forget([site], {})
    marks.append(time.perf_counter())
    return marks[1] - marks[0], marks[2] - marks[1]
