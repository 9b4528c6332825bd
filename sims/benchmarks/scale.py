"""`fedloom bench scale`: what a run costs its server against the number of sites; what the server receives from nodes.

Rounds and ledger are real. The sites answer without training, and their time does not count. Nodes are two Ray nodes on this
machine, each with a folder for its part of the ledger. The costs of 100 MB are processor seconds of one core for a network
of 25 million weights; other sizes follow from them.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.clients.protocol.messages import ORDER
from fedloom.conf import load
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.server.ledger.blobs import Blobs
from fedloom.server.rounds.listener import LogListener
from fedloom.server.rounds.loop import RoundLoop
from fedloom.server.run.training_run import one_round
from fedloom.sims.benchmarks import untrained
from fedloom.sims.benchmarks.measuring import MIB, fresh, nbytes, table
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.scratch_run import training_run
from fedloom.sims.progress.memory import own_bytes
from fedloom.sims.report.tables import Table

CASES = ((100, 100), (1000, 100), (10_000, 100), (100_000, 1000))  # sites, and how many a round asks
ROUNDS, NODE_ROUNDS = 8, 3
WEIGHTS = 25_000_000  # 100 MB of float32
MOST_STARTUP, MOST_SERVER, MOST_ORDER = 15.0, 0.2, 1024
COLUMNS = {"sites": "{sites}", "asked": "{asked}", "start-up, s": "{startup_s:.2f}", "server, s a round": "{server_s:.2f}",
           "received, MB a round": "{received_mb:.2f}", "order, bytes": "{order_bytes}", "memory, MiB": "{memory_mb:.2f}",
           "growth over rounds, MiB": "{growth_mb:.2f}", "ledger, networks a site": "{networks:.2f}"}  # fmt: skip
WAYS = {"each site's": [], "sums by worker": ["federation.partial_sums=true"],
        "sums by node": ["federation.partial_sums=true", "federation.node_store=$FEDLOOM_PART"]}  # fmt: skip


class TimedApp(ClientApp):
    """A ClientApp that answers at once. It counts its own seconds, and notes the size of the largest order."""

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
    """Measure each number of sites in a fresh process, then each way of summing over two nodes."""
    rows = [fresh("scale:server", *case, time.time()) for case in CASES]
    note = (f"Bars, to 10,000 sites: start-up at most {MOST_STARTUP:g} s; the server's own time for a round of 100 sites at "
            f"most {MOST_SERVER:g} s; an order without its arrays at most {MOST_ORDER} bytes. A round with 10,000 sites "
            f"takes {rows[2]['server_s'] / rows[0]['server_s']:.1f} times as long as with 100.")  # fmt: skip
    sites, asked = CASES[-1]
    ways = [{"sites": sites, "asked": asked, "way": way, **fresh("scale:nodes", sites, asked, way)} for way in WAYS]
    received = table(
        "Received by the server", {"what": "{way}", "MB a round": "{received_mb:.2f}", "s a round": "{round_s:.1f}"}, ways,
        f"{sites:,} sites, of which a round asks {asked:,}; two Ray nodes of one worker each on this machine.",
    )  # fmt: skip
    costs = constants()
    lines = [{"what": what, "seconds": seconds} for what, seconds in costs.items()]
    more = table("A network of 100 MB", {"what": "{what}", "s of one core": "{seconds:.2f}"}, lines)
    return [table("Scale", COLUMNS, rows, note), received, more], [*rows, *ways, {"constants": costs}]


def server(sites: int, asked: int, launched: float) -> dict[str, Any]:
    """Run rounds on the inline engine in this process, launched at `launched` (time.time); return times and sizes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, client = Path(temporary), TimedApp()
        config = load(str(written(sites, asked, ROUNDS, folder)))
        grid = InlineGrid(len(config.roster), folder / "stores", client)
        with training_run(config) as run:
            loop = RoundLoop(config, "scale", run.joined(grid), run.state, run.evaluator, LogListener())
            startup = time.time() - launched
            seconds, memory, received = [], [], 0
            for number in range(1, ROUNDS + 1):
                before, begin = client.seconds, time.perf_counter()
                received = sum(up for _, up in one_round(loop, number)["bytes"].values())
                seconds.append(time.perf_counter() - begin - (client.seconds - before))
                memory.append(own_bytes(os.getpid()))
            network = nbytes(run.state.aggregate().state)
            stored = sum(path.stat().st_size for path in (run.folder.path / "blobs").iterdir())
            contributors = len({contribution.blob for contribution in run.ledger.all_latest().values()})
    return {"sites": sites, "asked": asked, "startup_s": startup, "server_s": sorted(seconds)[len(seconds) // 2],
            "received_mb": received / 1e6, "order_bytes": client.order, "memory_mb": memory[-1] / MIB,
            "growth_mb": (memory[-1] - memory[1]) / MIB, "networks": stored / network / contributors}  # fmt: skip


def nodes(sites: int, asked: int, way: str) -> dict[str, Any]:
    """Run a few rounds over two Ray nodes; return the last one's seconds, and the MB of arrays that the server received."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        folder = Path(temporary)
        parts = [{"num_cpus": 1, "env_vars": {"FEDLOOM_PART": str(folder / f"part-{node}")}} for node in range(2)]
        cluster = Cluster(initialize_head=True, head_node_args={**parts[0], "include_dashboard": False})
        try:
            cluster.add_node(**parts[1])
            cluster.wait_for_nodes()
            return _rounds(sites, asked, [f"engine.address={cluster.address}", *WAYS[way]], folder)
        finally:
            cluster.shutdown()


def _rounds(sites: int, asked: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    from fedloom.sims.engines.ray import start

    config = load(str(written(sites, asked, NODE_ROUNDS, folder)), ["engine.name=ray", "engine.workers=2", *overrides])
    grid = start(config, app="fedloom.sims.benchmarks.untrained:app")
    try:
        with training_run(config) as run:
            channel = run.joined(grid)
            run.state.attach(channel.parts(run.ledger.run().run))
            loop, received, seconds = run.begin(channel, LogListener()), 0, 0.0
            for number in range(1, NODE_ROUNDS + 1):
                before, begin = grid.received, time.perf_counter()
                one_round(loop, number)
                seconds, received = time.perf_counter() - begin, grid.received - before
    finally:
        grid.close()
    return {"roster": len(config.roster), "received_mb": received / 1e6, "round_s": seconds}


def written(sites: int, asked: int, rounds: int, folder: Path) -> Path:
    """Write an experiment that lists its sites one by one, and return the file."""
    entries = [f"  - {{domain: digits, name: client-{site:06d}, samples: {10 + site % 50}}}" for site in range(sites)]
    path = folder / "scale.yaml"
    path.write_text("\n".join(["sites:", *entries, f"rounds: {rounds}", "network: {name: conv6, width: 0.5}",
                               "objective: {name: sum_aggregation}", "strategy: {name: sum_aggregation}",
                               "data: {size: 8, test_limit: 100}", f"federation: {{fraction: {asked / sites}}}",
                               "evaluation: {every: 1000000, sites: 0}", "engine: {name: inline}",
                               f"run: {{root: {folder / 'runs'}}}"]))  # fmt: skip
    return path


def constants() -> dict[str, float]:
    """Return the processor seconds of one core for each step that a network of WEIGHTS weights goes through."""
    torch.set_num_threads(1)
    state = {"weights": torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(0))}
    integers, total = quantise(state, 32), ExactSum()
    total.add(integers)
    with tempfile.TemporaryDirectory() as folder:
        blobs = Blobs(Path(folder))
        return {"node: to integers": _seconds(lambda: quantise(state, 32)),
                "node: add": _seconds(lambda: total.add(integers)),
                "node: hash and write": _seconds(lambda: blobs.put(state)),
                "server: add a node's sum": _seconds(lambda: total.merge(integers, 1))}  # fmt: skip


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin
