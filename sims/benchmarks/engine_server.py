"""The ServerApp's side of the cases, the same on every engine: rounds through a Grid.

Each round yields its seconds, or, where a reply failed, why it does not count.
"""

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp import Grid

from fedloom.clients.protocol.messages import TRAIN
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.run.training_run import one_round
from fedloom.sims.benchmarks.engine_job import Job
from fedloom.sims.operations.scratch_run import joined_channel, round_loop

TIMEOUT = 600.0
POLL_SECONDS = 0.05


def message_rounds(job: Job, grid: Grid) -> Iterator[float | str]:
    """Send one shared record to the asked sites, take back what they send: from the first push to the last reply."""
    case, sites = job.case, job.config().roster
    nodes = dict(zip((site.name for site in sites), _all_nodes(grid, len(sites)), strict=True))
    federation = ClientChannel(grid, sites, case.window)
    federation.nodes.update(nodes)
    for round in itertools.count(1):
        record = ArrayRecord([np.full(case.floats, round, np.float32)])
        first = (round - 1) * case.asked % len(sites)
        orders = [(site, RecordDict({"payload": record})) for site in sites[first : first + case.asked]]
        begin = time.perf_counter()
        failed = [reply for reply in federation.ask(TRAIN, orders, round, TIMEOUT) if reply.content is None]
        taken = time.perf_counter() - begin
        yield f"{len(failed)} replies failed: {failed[0].reason}" if failed else taken


def training_rounds(job: Job, grid: Grid) -> Iterator[float | str]:
    """The project's own round loop, without evaluation: planning, folding and committing count."""
    config = job.config()
    _all_nodes(grid, len(config.roster))
    loop = round_loop(config, "bench", joined_channel(grid, config, TIMEOUT), job.folder)
    for round in itertools.count(1):
        record = one_round(loop, round)
        reasons = list(record["dropped"].values())
        yield f"{len(reasons)} replies failed: {reasons[0]}" if reasons else record["seconds"]


ROUNDS: dict[str, Callable[[Job, Grid], Iterator[float | str]]] = {"messages": message_rounds, "training": training_rounds}
CLIENTS = {"messages": "fedloom.sims.benchmarks.engine_apps:echo", "training": "fedloom.clients.app:app"}


def _all_nodes(grid: Grid, number: int) -> list[int]:
    """The grid's nodes, as soon as all are there: stock simulation starts before they are."""
    deadline = time.monotonic() + TIMEOUT
    while len(nodes := list(grid.get_node_ids())) < number:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(nodes)} of {number} nodes came within {TIMEOUT:g} s")
        time.sleep(POLL_SECONDS)
    return nodes
