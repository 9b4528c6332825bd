"""Whether the ray engine's memory stays flat: 20 sites of 1 MB, 200 rounds; memory after round 20 and after round 200."""

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from fedloom.conf import load
from fedloom.sims.engines.ray import start
from fedloom.sims.progress.memory import descendants, own_bytes
from fedloom.sims.report.tables import Table

SITES, FLOATS, ROUNDS, EARLY = 20, 250_000, 200, 20
MIB = 2**20


def bench() -> tuple[Table, list[dict[str, Any]]]:
    """One run; a table and its rows: MiB of driver, workers and object store after an early and after the last round."""
    with tempfile.TemporaryDirectory() as temporary:
        entry = f"sites=[{{domain: digits, count: {SITES}}}]"
        grid = start(load("digits", [entry, f"run.root={temporary}"]), "fedloom.sims.benchmarks.engine_apps:echo")
        try:
            nodes, taken = list(grid.get_node_ids()), {}
            for round in range(1, ROUNDS + 1):
                shared = RecordDict({"weights": ArrayRecord([np.full(FLOATS, round, np.float32)])})
                sent = [Message(shared, node, "train", group_id=str(round)) for node in nodes]
                replies = [reply for reply in grid.send_and_receive(sent) if not reply.has_error()]
                assert len(replies) == SITES, f"round {round}: {len(replies)} of {SITES} sites answered"
                del replies, sent, shared
                if round in (EARLY, ROUNDS):
                    taken[round] = _memory()
        finally:
            grid.close()
    rows = [
        {"what": what, "early_mb": taken[EARLY][what] / MIB, "late_mb": taken[ROUNDS][what] / MIB} for what in taken[EARLY]
    ]
    for row in rows:
        row["growth"] = (row["late_mb"] - row["early_mb"]) / max(row["early_mb"], 1e-9)
    lines = [[r["what"], f"{r['early_mb']:.1f}", f"{r['late_mb']:.1f}", f"{100 * r['growth']:+.1f} %"] for r in rows]
    head = ["memory of", f"after round {EARLY}, MiB", f"after round {ROUNDS}, MiB", "growth"]
    return Table("Memory of the ray engine", head, lines, f"{SITES} sites, 1 MB each way"), rows


def _memory() -> dict[str, float]:
    """Bytes of the driver, the workers, and the object store (shared memory that Ray's daemon holds)."""
    workers = raylet = 0
    for process in itertools.islice(descendants(os.getpid()), 1, None):
        words = Path(f"/proc/{process}/cmdline").read_bytes()
        if words.startswith(b"ray::Worker"):
            workers += own_bytes(process)
        elif b"/raylet/raylet" in words:
            raylet = int(Path(f"/proc/{process}/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    return {"driver": own_bytes(os.getpid()), "workers": workers, "object store": raylet}
