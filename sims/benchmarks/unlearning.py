"""`fedloom bench unlearning`: seconds to remove a site, against the number of sites and the size of their contributions."""

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
from fedloom.sims.benchmarks.measuring import MIB, nbytes, small_sites, table
from fedloom.sims.report.tables import Table

CASES = {"100 sites of 4 MB": (100, 3.75), "100 sites of 0.3 MB": (100, 1.0), "1,000 sites of 0.3 MB": (1000, 1.0)}
REPEATS = 5
MOST_SECONDS, MOST_GROWTH = 1.0, 1.5
COLUMNS = {"case": "{case}", "state, MiB": "{state_mb:.2f}", "subtract": "{subtract_s:.3f}", "commit": "{commit_s:.3f}",
           "all": "{total_s:.3f}"}  # fmt: skip


def bench() -> tuple[Table, list[dict[str, Any]]]:
    """Measure each case: medians over a few sites that are removed one after the other."""
    rows = []
    for name, (sites, width) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"case": name, **measure(sites, width, Path(folder))})
    note = (
        f"Medians of {REPEATS} sites. Commit: writing the new sum, one transaction, deleting the site's files. Bars: at "
        f"most {MOST_SECONDS:g} s; 1,000 sites take at most {MOST_GROWTH} times as long as 100 (here "
        f"{rows[2]['total_s'] / rows[1]['total_s']:.2f})."
    )
    return table("Removing a site, seconds", COLUMNS, rows, note), rows


def measure(sites: int, width: float, folder: Path) -> dict[str, float]:
    """Remove a few sites; return median seconds of subtraction, commit and both, and the size of a state in MiB."""
    config = load(
        "digits", [small_sites(sites), f"network.width={width}", "objective.initialisation=own", f"run.root={folder}"]
    )
    state = ServerState(Setup(resolve(config), config.roster, folder))
    size = nbytes(state.aggregate().state)
    parts = [_removal(state, site.name) for site in config.roster[:REPEATS]]
    state.ledger.close()
    subtract, commit, total = map(statistics.median, zip(*((*both, sum(both)) for both in parts), strict=True))
    return {"state_mb": size / MIB, "subtract_s": subtract, "commit_s": commit, "total_s": total}


def _removal(state: ServerState, site: str) -> tuple[float, float]:
    """Remove a site; return the seconds of the subtraction and of the commit."""
    times = [time.perf_counter()]
    membership = Membership(state.slots, before_commit=lambda: times.append(time.perf_counter()))  # called between the two
    membership.forget([site], {})
    times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1]
