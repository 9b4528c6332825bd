"""`fedloom bench many_faults`: 1,000 sites, 50 rounds; a seeded 1% of the answers raise, 0.5% kill their worker.

The run must finish, name each site that failed, and leave the bits of the inline engine with the same failures.
"""

import os
import signal
import sys
import tempfile
import time
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedloom.clients.protocol.messages import read_order
from fedloom.conf import load
from fedloom.conf.randomness import generator
from fedloom.conf.schema import Config
from fedloom.server.rounds.listener import Silent
from fedloom.server.run.training_run import all_rounds
from fedloom.sims.benchmarks import untrained
from fedloom.sims.benchmarks.measuring import small_sites, table
from fedloom.sims.benchmarks.soak_run import begun, left_by
from fedloom.sims.engines import ray
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.report.tables import Table

RAISES, KILLS = 0.01, 0.005
COLUMNS = {"engine": "{engine}", "seconds": "{seconds:.1f}", "failures named": "{failed}", "failures planned": "{planned}",
           "digest of the sum": "{digest:.16}"}  # fmt: skip


faulty = ClientApp()
faulty.query()(untrained.identify)


@faulty.train()
def train_or_fail(message: Message, context: Context) -> Message:
    """Return the shifted initial network, or fail: raise, or kill the process if it is a Ray worker."""
    order = read_order(message.content)
    kind = fault(order.site, order.round)
    if kind == "kill" and sys.argv[0].endswith("default_worker.py"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind:
        raise RuntimeError(f"seeded fault: {kind}")
    return untrained.train(message, context)


def fault(site: int, round: int) -> str:
    """Return what goes wrong at a site in a round: "raise", "kill" or "" (nothing)."""
    draw = float(generator(0, "faults", str(site), str(round)).random())
    return "kill" if draw < KILLS else "raise" if draw < KILLS + RAISES else ""


def bench(sites: int = 1000, rounds: int = 50) -> tuple[Table, list[dict[str, Any]]]:
    """Run both engines; rows have seconds, the number of named failures, and the digest of the exact sum."""
    with tempfile.TemporaryDirectory() as root:
        overrides = [small_sites(sites), f"rounds={rounds}", "network.width=0.25", "data.size=8", "evaluation.every=1000000"]
        inline, over_ray = (load("digits", [*overrides, f"run.root={root}/{engine}"]) for engine in ("inline", "ray"))
        rows = [{"engine": "inline", **run(inline, InlineGrid(sites, store_folder(inline), faulty))}]
        grid = ray.start(over_ray, "fedloom.sims.benchmarks.many_faults:faulty")
        try:
            rows.append({"engine": "ray", **run(over_ray, grid)})
        finally:
            grid.close()
    planned = sum(bool(fault(site, round)) for round in range(1, rounds + 1) for site in range(sites))
    same = "the same bits" if rows[0]["digest"] == rows[1]["digest"] else "DIFFERENT BITS"
    lines = [{**row, "planned": planned} for row in rows]
    return table("Faults", COLUMNS, lines, f"{sites} sites, {rounds} rounds: {same}"), rows


def run(config: Config, grid: Grid) -> dict[str, Any]:
    """Run all rounds on a grid; return seconds, failures and digest."""
    begin = time.monotonic()
    loop = begun(config, grid, Silent())
    failed = {(record["round"], site) for record in all_rounds(loop) for site in record["dropped"]}
    left = left_by(loop)
    return {"seconds": time.monotonic() - begin, "failed": len(failed), "digest": left.sums[-1]}
