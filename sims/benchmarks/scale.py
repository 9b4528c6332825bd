"""What a run costs its server against the number of sites: an explicit list of them, of which some are asked a round.

Real rounds over the inline engine, real ledger; the sites answer without training, and their time is taken off.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.clients.protocol.messages import ORDER
from fedloom.conf import load
from fedloom.server.rounds.listener import LogListener
from fedloom.server.rounds.loop import RoundLoop
from fedloom.server.run.training_run import one_round
from fedloom.sims.benchmarks import scale_nodes, untrained
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.scratch_run import training_run
from fedloom.sims.progress.memory import own_bytes
from fedloom.sims.report.tables import Table

MIB = 2**20
CASES = ((100, 100), (1000, 100), (10_000, 100), (100_000, 1000))  # sites, and how many are asked a round
ROUNDS = 8
MOST_STARTUP, MOST_SERVER, MOST_ORDER = 15.0, 0.2, 1024


class TimedApp(ClientApp):
    """Answers at once; it adds up its own time, and keeps the size of the largest order."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.order = 0.0, 0

    def __call__(self, message: Message, context: Context) -> Message:
        begin = time.perf_counter()
        if ORDER in message.content.config_records:
            self.order = max(self.order, len(str(message.content.config_records[ORDER]["json"])))
        reply = untrained.app(message, context)
        self.seconds += time.perf_counter() - begin
        return reply


def bench() -> tuple[list[Table], list[dict[str, Any]]]:
    """One fresh process for each number of sites; then what a cluster's nodes send (sims.benchmarks.scale_nodes)."""
    rows = []
    for case in CASES:
        words = [sys.executable, "-P", "-m", __name__, *map(str, case)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    head = ["sites", "asked", "start-up, s", "server, s a round", "received, MB a round",
            "order, bytes", "memory, MiB", "growth over rounds, MiB",
            "ledger, networks a site"]  # fmt: skip
    keys = ("asked", "startup_s", "server_s", "received_mb", "order_bytes", "memory_mb", "growth_mb", "networks")
    lines = [
        [row["sites"], *(f"{row[key]:.2f}" if isinstance(row[key], float) else row[key] for key in keys)] for row in rows
    ]
    note = (f"Bars, to 10,000 sites: start-up at most {MOST_STARTUP:g} s, a round of 100 at most {MOST_SERVER:g} s of the "
            f"server's own time; an order at most {MOST_ORDER} bytes beside its arrays. From 100 to 10,000 sites a round "
            f"takes {rows[2]['server_s'] / rows[0]['server_s']:.1f} times as long.")  # fmt: skip
    more, further = scale_nodes.tables(*CASES[-1])
    return [Table("Scale", head, lines, note), *more], [*rows, *further]


def one(sites: int, asked: int, folder: Path, begun: float) -> dict[str, Any]:
    """The measurement itself, in this process, which began at `begun` (time.time)."""
    config = load(str(scale_nodes.written(sites, asked, ROUNDS, folder)))
    client = TimedApp()
    grid = InlineGrid(len(config.roster), folder / "stores", client)
    with training_run(config) as method:
        loop = RoundLoop(config, "scale", method.joined(grid), method.state, method.evaluator, LogListener())
        startup = time.time() - begun
        seconds, memory, received = [], [], []
        for number in range(1, ROUNDS + 1):
            before, begin = client.seconds, time.perf_counter()
            record = one_round(loop, number)
            received.append(sum(up for _, up in record["bytes"].values()))
            seconds.append(time.perf_counter() - begin - (client.seconds - before))
            memory.append(own_bytes(os.getpid()))
        network = sum(tensor.nbytes for tensor in method.state.aggregate().state.values())
        kept = sum(path.stat().st_size for path in (method.folder.path / "blobs").iterdir())
        contributors = len({one.blob for one in method.ledger.all_latest().values()})
    return {"sites": sites, "asked": asked, "startup_s": startup, "server_s": sorted(seconds)[len(seconds) // 2],
            "received_mb": received[-1] / 1e6, "order_bytes": client.order,
            "memory_mb": memory[-1] / MIB, "growth_mb": (memory[-1] - memory[1]) / MIB,
            "networks": kept / network / contributors}  # fmt: skip


if __name__ == "__main__":
    start = time.time() - time.process_time()  # what was imported before counts
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(one(int(sys.argv[1]), int(sys.argv[2]), Path(temporary), start)))
