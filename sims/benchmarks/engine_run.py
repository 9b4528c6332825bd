"""The process of one measurement, `python -m fedloom.sims.benchmarks.engine_run JOB`: the rounds of a case on an engine.

The server's side is the same on every engine. `app` is the ServerApp of the stock simulation. Plain loops of torch need
neither Flower nor this project's engines.
"""

import contextlib
import functools
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedloom.clients.data import site_examples
from fedloom.clients.networks import Network, architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.protocol.messages import TRAIN
from fedloom.conf import from_json, to_json
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.run.training_run import one_round
from fedloom.sims.benchmarks.engine_cases import CLIENTS, LOOPS, Job, read_job
from fedloom.sims.operations.scratch_run import joined_channel, round_loop

TIMEOUT = 600.0
POLL_SECONDS = 0.05
Weights = dict[str, np.ndarray]
Task = tuple[str, int, int, Weights]  # configuration, site, round, weights to start with

app = ServerApp()


@app.main()
def stock(grid: Grid, context: Context) -> None:
    """Run the job that the app's run-config names, in the stock simulation."""
    job = read_job(Path(str(context.run_config["job"])))
    grid.poll_seconds = POLL_SECONDS  # type: ignore[attr-defined]  # ClientChannel reads it; Flower's own loop waits 0.1 s
    job.measure(server_rounds(job, grid))


def run(job: Job) -> None:
    """Run all rounds of the job in this process: by a plain loop, or by an engine and the server's side."""
    if job.engine in LOOPS:
        with contextlib.closing(loop_rounds(job)) as rounds:
            job.measure(rounds)
    else:
        with contextlib.closing(_grid(job)) as grid:
            job.measure(server_rounds(job, grid))


def _grid(job: Job) -> Any:
    """Engines are imported here: a plain loop needs none."""
    if job.engine == "inline":
        from fedloom.clients.app import app as real
        from fedloom.sims.benchmarks import echo
        from fedloom.sims.engines.inline import InlineGrid

        return InlineGrid(len(job.config.roster), job.folder, real if job.case.kind == "training" else echo.app)
    from fedloom.sims.engines import ray

    return ray.start(job.config, CLIENTS[job.case.kind])


def server_rounds(job: Job, grid: Grid) -> Iterator[float | str]:
    """Yield the seconds of each round through a Grid, or why it does not count (a reply failed)."""
    return (_training_rounds if job.case.kind == "training" else _message_rounds)(job, grid)


def _message_rounds(job: Job, grid: Grid) -> Iterator[float | str]:
    """Send one shared record to some sites and receive it back: from the first push to the last reply."""
    case, sites = job.case, job.config.roster
    channel = ClientChannel(grid, sites, case.window)
    channel.nodes.update(zip((site.name for site in sites), _all_nodes(grid, len(sites)), strict=True))
    for round in itertools.count(1):
        record = ArrayRecord([np.full(case.floats, round, np.float32)])
        first = (round - 1) * case.asked % len(sites)
        orders = [(site, RecordDict({"payload": record})) for site in sites[first : first + case.asked]]
        begin = time.perf_counter()
        failed = [reply for reply in channel.ask(TRAIN, orders, round, TIMEOUT) if reply.content is None]
        taken = time.perf_counter() - begin
        yield f"{len(failed)} replies failed: {failed[0].reason}" if failed else taken


def _training_rounds(job: Job, grid: Grid) -> Iterator[float | str]:
    """Run the project's own round loop without evaluation: planning, summing and committing count."""
    config = job.config
    _all_nodes(grid, len(config.roster))
    loop = round_loop(config, "bench", joined_channel(grid, config, TIMEOUT), job.folder)
    for round in itertools.count(1):
        record = one_round(loop, round)
        reasons = list(record["dropped"].values())
        yield f"{len(reasons)} replies failed: {reasons[0]}" if reasons else record["seconds"]


def _all_nodes(grid: Grid, number: int) -> list[int]:
    """Wait until all nodes of the grid have joined; the stock simulation calls its ServerApp before that."""
    deadline = time.monotonic() + TIMEOUT
    while len(nodes := list(grid.get_node_ids())) < number:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(nodes)} of {number} nodes joined within {TIMEOUT:g} s")
        time.sleep(POLL_SECONDS)
    return nodes


def loop_rounds(job: Job) -> Generator[float]:
    """Yield the seconds of each round of FedAvg without any framework: draw sites, train each, average."""
    config, draw = job.config, np.random.default_rng(0)
    text, weights = to_json(config), {name: tensor.numpy() for name, tensor in initial_state(config).items()}
    with _mapper(LOOPS[job.engine]) as train_all:
        for round in itertools.count(1):
            begin = time.perf_counter()
            chosen = draw.choice(job.case.sites, size=job.case.asked, replace=False)
            replies = train_all([(text, int(site), round, weights) for site in chosen])
            weights = {name: np.mean([reply[name] for reply in replies], axis=0) for name in weights}
            yield time.perf_counter() - begin


@contextlib.contextmanager
def _mapper(processes: int) -> Iterator[Callable[[list[Task]], list[Weights]]]:
    """A function that trains a list of tasks. Each of several processes gets two parts of them, as parts may be unequal."""
    if processes == 1:
        yield lambda tasks: [train(task) for task in tasks]
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield lambda tasks: pool.map(train, tasks, chunksize=-(-len(tasks) // (2 * processes)))


def train(task: Task) -> Weights:
    """Train a site for its epochs of SGD, and return its weights."""
    text, site, round, weights = task
    config, sites, network = _prepared(text)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    images = site_examples(config, sites[site])
    training = config.training
    optimiser = torch.optim.SGD(network.parameters(), lr=training.rate, momentum=training.momentum, foreach=True)
    generator = torch.Generator().manual_seed(1000 * round + site)
    for _ in range(int(training.epochs)):
        for batch in torch.randperm(len(images), generator=generator).split(training.batch):
            loss = F.cross_entropy(network(images.x[batch].float() / 255), images.y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return {name: tensor.numpy().copy() for name, tensor in network.state_dict().items()}


@functools.lru_cache(maxsize=1)
def _prepared(text: str) -> tuple[Config, list[Site], Network]:
    """What all tasks of this process need."""
    config = from_json(text)
    torch.set_num_threads(config.engine.threads)
    return config, config.roster, architecture_of(config).build()


if __name__ == "__main__":
    run(read_job(Path(sys.argv[1])))
