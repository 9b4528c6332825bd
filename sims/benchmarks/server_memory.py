"""Peak memory of the server against the number of sites: real rounds, real disk, sites that answer 4 MB without training."""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fedloom.conf import load
from fedloom.server.run.training_run import all_rounds
from fedloom.sims.benchmarks import untrained
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.scratch_run import joined_channel, round_loop
from fedloom.sims.report.tables import Table

MIB = 2**20
ROUNDS = 2


def bench(counts: tuple[int, ...] = (10, 200)) -> tuple[Table, list[dict[str, Any]]]:
    """One fresh process for each number of sites; a table and its rows (sites, state_mb, start_mb, peak_mb)."""
    rows = []
    for sites in counts:
        done = subprocess.run([sys.executable, "-P", "-m", __name__, str(sites)], check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    lines = [[row["sites"], *(f"{row[key]:.1f}" for key in ("state_mb", "start_mb", "peak_mb"))] for row in rows]
    head = ["sites", "a site's state, MiB", "RSS before the first round, MiB", f"peak RSS, {ROUNDS} rounds, MiB"]
    return Table("Server memory", head, lines, "sum aggregation, inline engine, window 8, no training"), rows


def one(sites: int, folder: Path) -> dict[str, float]:
    """The measurement itself, in this process."""
    entry = f"sites=[{{domain: digits, count: {sites}, partition: {{min_samples: 1}}}}]"
    overrides = [entry, f"rounds={ROUNDS}", "network.width=3.75", "federation.window=8", f"run.root={folder}"]
    config = load("digits", ["engine.name=inline", *overrides])
    grid = InlineGrid(sites, folder, untrained.app)
    loop = round_loop(config, "memory", joined_channel(grid, config, 10.0), folder)
    size = sum(tensor.numel() * tensor.element_size() for tensor in loop.state.aggregate().state.values())
    start = peak_rss()
    list(all_rounds(loop))
    return {"sites": sites, "state_mb": size / MIB, "start_mb": start / MIB, "peak_mb": peak_rss() / MIB}


def peak_rss() -> int:
    """The largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(one(int(sys.argv[1]), Path(temporary))))
