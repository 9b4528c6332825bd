"""`fedloom bench memory`: the server's peak memory against the number of sites. Sites send 4 MB each without training."""

import tempfile
from pathlib import Path
from typing import Any

from fedloom.conf import load
from fedloom.server.run.training_run import all_rounds
from fedloom.sims.benchmarks import untrained
from fedloom.sims.benchmarks.measuring import MIB, fresh, nbytes, peak_mib, small_sites, table
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.scratch_run import joined_channel, round_loop
from fedloom.sims.report.tables import Table

ROUNDS = 2
COLUMNS = {"sites": "{sites}", "a site's state, MiB": "{state_mb:.1f}", "RSS before the first round, MiB": "{start_mb:.1f}",
           f"peak RSS, {ROUNDS} rounds, MiB": "{peak_mb:.1f}"}  # fmt: skip


def bench(counts: tuple[int, ...] = (10, 200)) -> tuple[Table, list[dict[str, Any]]]:
    """Measure each number of sites in a fresh process, with real rounds and files, on the inline engine."""
    rows = [fresh("memory:measure", sites) for sites in counts]
    return table("Server memory", COLUMNS, rows, "sum aggregation, inline engine, window 8, no training"), rows


def measure(sites: int) -> dict[str, float]:
    """Run the rounds in this process and return its peak memory before and after them, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"rounds={ROUNDS}", "network.width=3.75", "federation.window=8", f"run.root={folder}"]
        config = load("digits", ["engine.name=inline", small_sites(sites), *overrides])
        grid = InlineGrid(sites, Path(folder), untrained.app)
        loop = round_loop(config, "memory", joined_channel(grid, config, 10.0), Path(folder))
        size, start = nbytes(loop.state.aggregate().state), peak_mib()
        list(all_rounds(loop))
    return {"sites": sites, "state_mb": size / MIB, "start_mb": start, "peak_mb": peak_mib()}
