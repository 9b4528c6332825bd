"""A long run with faults: 1,000 sites, 50 rounds, a seeded 1 % of the answers raise and 0.5 % kill their worker.

It has to end, name every site that failed, and leave the bits that the inline engine leaves, given the same failures.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedloom.conf import load
from fedloom.conf.schema import Config
from fedloom.server.rounds.listener import Silent
from fedloom.server.run.training_run import all_rounds
from fedloom.sims.benchmarks import untrained
from fedloom.sims.benchmarks.soak_run import begun, left_by
from fedloom.sims.engines import ray
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.report.tables import Table


def bench(sites: int = 1000, rounds: int = 50) -> tuple[Table, list[dict[str, Any]]]:
    """Both engines; a table and its rows: seconds, failures named and expected, digest of the exact sum."""
    with tempfile.TemporaryDirectory() as temporary:
        inline = configured(Path(temporary) / "inline", sites, rounds)
        rows = [{"engine": "inline", **run(inline, InlineGrid(sites, store_folder(inline), untrained.faulty))}]
        config = configured(Path(temporary) / "ray", sites, rounds)
        grid = ray.start(config, "fedloom.sims.benchmarks.untrained:faulty")
        try:
            rows.append({"engine": "ray", **run(config, grid)})
        finally:
            grid.close()
    expected = sum(bool(untrained.fault(site, round)) for round in range(1, rounds + 1) for site in range(sites))
    lines = [[row["engine"], f"{row['seconds']:.1f}", row["failed"], expected, row["digest"][:16]] for row in rows]
    head = ["engine", "seconds", "failures named", "failures planned", "digest of the sum"]
    same = "the same bits" if rows[0]["digest"] == rows[1]["digest"] else "DIFFERENT BITS"
    return Table("Faults", head, lines, f"{sites} sites, {rounds} rounds: {same}"), rows


def configured(root: Path, sites: int, rounds: int) -> Config:
    """The experiment: many sites that only pretend to train."""
    entry = f"sites=[{{domain: digits, count: {sites}, partition: {{min_samples: 1}}}}]"
    small = ["network.width=0.25", "data.size=8", "evaluation.every=1000000"]
    return load("digits", [entry, f"rounds={rounds}", *small, f"run.root={root}"])


def run(config: Config, grid: Grid) -> dict[str, Any]:
    """All rounds on a grid."""
    begin = time.monotonic()
    loop = begun(config, grid, Silent())
    failed = {(record["round"], site) for record in all_rounds(loop) for site in record["dropped"]}
    left = left_by(loop)
    return {"seconds": time.monotonic() - begin, "failed": len(failed), "digest": left.sums[-1]}
