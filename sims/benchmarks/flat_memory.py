"""`fedloom bench flat_memory`: memory of the Ray engine after round 20 and round 200; 20 sites send 1 MB each way."""

import tempfile
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from fedloom.conf import load
from fedloom.sims.benchmarks.measuring import MIB, table
from fedloom.sims.benchmarks.processes import Processes
from fedloom.sims.engines.ray import start
from fedloom.sims.report.tables import Table

SITES, FLOATS, ROUNDS, EARLY = 20, 250_000, 200, 20
COLUMNS = {"memory of": "{what}",
           f"after round {EARLY}, MiB": "{early_mb:.1f}", f"after round {ROUNDS}, MiB": "{late_mb:.1f}",
           "growth": "{growth:+.1%}"}  # fmt: skip


def bench() -> tuple[Table, list[dict[str, Any]]]:
    """Run the rounds; return the memory of driver, workers and object store after round 20 and round 200."""
    taken, processes = {}, Processes()
    with tempfile.TemporaryDirectory() as folder:
        config = load("digits", [f"sites=[{{domain: digits, count: {SITES}}}]", f"run.root={folder}"])
        grid = start(config, "fedloom.sims.benchmarks.echo:app")
        try:
            nodes = list(grid.get_node_ids())
            for round in range(1, ROUNDS + 1):
                shared = RecordDict({"weights": ArrayRecord([np.full(FLOATS, round, np.float32)])})
                sent = [Message(shared, node, "train", group_id=str(round)) for node in nodes]
                replies = [reply for reply in grid.send_and_receive(sent) if not reply.has_error()]
                assert len(replies) == SITES, f"round {round}: {len(replies)} of {SITES} sites answered"
                del replies, sent, shared
                if round in (EARLY, ROUNDS):
                    taken[round] = processes.sample()
        finally:
            grid.close()
    processes.left()
    pairs = {what: [taken[round][what] for round in (EARLY, ROUNDS)] for what in ("driver", "workers", "object store")}
    rows = [{"what": what, "early_mb": early / MIB, "late_mb": late / MIB, "growth": (late - early) / max(early, 1)}
            for what, (early, late) in pairs.items()]  # fmt: skip
    return table("Memory of the ray engine", COLUMNS, rows, f"{SITES} sites, 1 MB each way"), rows
