"""What arrives at the server in a round: from each site, or one sum from each of two nodes; and what 100 MB cost.

Two Ray nodes on this machine, each with a folder of its own; sites answer without training. The constants are processor
seconds of one core for a network of 25 million weights: from them follows what other sizes take.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedloom.conf import load
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.server.ledger.blobs import Blobs
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.training_run import one_round
from fedloom.sims.operations.scratch_run import training_run
from fedloom.sims.report.tables import Table

ROUNDS = 3
WEIGHTS = 25_000_000  # 100 MB of float32
WAYS = {"each site's": [], "sums by worker": ["federation.partial_sums=true"],
        "sums by node": ["federation.partial_sums=true", "federation.node_store=$FEDLOOM_PART"]}  # fmt: skip


def tables(sites: int, asked: int) -> tuple[list[Table], list[dict[str, Any]]]:
    """A fresh process for each way; bytes of a round, and the constants."""
    rows = []
    for way in WAYS:
        words = [sys.executable, "-P", "-m", __name__, str(sites), str(asked), way]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        rows.append({"sites": sites, "asked": asked, "way": way, **json.loads(done.stdout.splitlines()[-1])})
    lines = [[row["way"], f"{row['received_mb']:.2f}", f"{row['round_s']:.1f}"] for row in rows]
    note = f"{sites:,} sites, {asked:,} asked a round, two Ray nodes of one worker each on this machine."
    found = constants()
    received = Table("Received by the server", ["what", "MB a round", "s a round"], lines, note)
    costs = Table("A network of 100 MB", ["what", "s of one core"], [[what, f"{found[what]:.2f}"] for what in found])
    return [received, costs], [*rows, {"constants": found}]


def one(sites: int, asked: int, way: str, folder: Path) -> dict[str, Any]:
    """The last of a few rounds over two Ray nodes: bytes of arrays that the server received, and seconds."""
    from ray.cluster_utils import Cluster

    parts = [{"num_cpus": 1, "env_vars": {"FEDLOOM_PART": str(folder / f"part-{place}")}} for place in range(2)]
    cluster = Cluster(initialize_head=True, head_node_args={**parts[0], "include_dashboard": False})
    try:
        cluster.add_node(**parts[1])
        cluster.wait_for_nodes()
        return _rounds(sites, asked, [f"engine.address={cluster.address}", *WAYS[way]], folder)
    finally:
        cluster.shutdown()


def _rounds(sites: int, asked: int, words: list[str], folder: Path) -> dict[str, Any]:
    from fedloom.sims.engines.ray import start

    fixed = ["engine.name=ray", "engine.workers=2"]
    config = load(str(written(sites, asked, ROUNDS, folder)), [*fixed, *words])
    grid = start(config, app="fedloom.sims.benchmarks.untrained:app")
    try:
        with training_run(config) as method:
            federation = method.joined(grid)
            method.state.attach(federation.parts(method.ledger.run().run))
            loop = method.begin(federation, LogListener())
            received, seconds = [0], 0.0
            for number in range(1, ROUNDS + 1):
                begin = time.perf_counter()
                one_round(loop, number)
                seconds = time.perf_counter() - begin
                received.append(grid.received)
    finally:
        grid.close()
    return {"roster": len(config.roster), "received_mb": (received[-1] - received[-2]) / 1e6, "round_s": seconds}


def written(sites: int, asked: int, rounds: int, folder: Path) -> Path:
    """An experiment whose sites stand one by one in its file."""
    entries = [f"  - {{domain: digits, name: client-{place:06d}, samples: {10 + place % 50}}}" for place in range(sites)]
    path = folder / "scale.yaml"
    path.write_text("\n".join(["sites:", *entries, f"rounds: {rounds}", "network: {name: conv6, width: 0.5}",
                               "objective: {name: sum_aggregation}", "strategy: {name: sum_aggregation}",
                               "data: {size: 8, test_limit: 100}", f"federation: {{fraction: {asked / sites}}}",
                               "evaluation: {every: 1000000, sites: 0}", "engine: {name: inline}",
                               f"run: {{root: {folder / 'runs'}}}"]))  # fmt: skip
    return path


def constants() -> dict[str, float]:
    """Processor seconds of one core for what happens to a network of WEIGHTS weights on its way."""
    torch.set_num_threads(1)
    state = {"weights": torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(0))}
    whole, total = quantise(state, 32), ExactSum()
    total.add(whole)
    with tempfile.TemporaryDirectory() as folder:
        blobs = Blobs(Path(folder))
        return {"node: to integers": _seconds(lambda: quantise(state, 32)), "node: add": _seconds(lambda: total.add(whole)),
                "node: hash and write": _seconds(lambda: blobs.put(state)),
                "server: add a node's sum": _seconds(lambda: total.merge(whole, 1))}  # fmt: skip


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        print(json.dumps(one(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(temporary))))
