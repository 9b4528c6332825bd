"""FedAvg without any framework: plain torch in one process, or in a pool of them. What engines are compared with."""

import contextlib
import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable, Generator, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from fedloom.clients.data import site_images
from fedloom.clients.networks import Network, architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.conf import from_json, to_json
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.sims.benchmarks.engine_cases import LOOPS
from fedloom.sims.benchmarks.engine_job import Job

Weights = dict[str, np.ndarray]
Task = tuple[str, int, int, Weights]  # configuration, site, round, where to start


def loop_rounds(job: Job) -> Generator[float]:
    """Draw sites, train each, average: seconds of each round."""
    config, draw = job.config(), np.random.default_rng(0)
    text, weights = to_json(config), {name: tensor.numpy() for name, tensor in initial_state(config).items()}
    with _mapper(LOOPS[job.engine]) as apply:
        for round in itertools.count(1):
            begin = time.perf_counter()
            chosen = draw.choice(job.case.sites, size=job.case.asked, replace=False)
            replies = apply([(text, int(site), round, weights) for site in chosen])
            weights = {name: np.mean([reply[name] for reply in replies], axis=0) for name in weights}
            yield time.perf_counter() - begin


@contextlib.contextmanager
def _mapper(processes: int) -> Iterator[Callable[[list[Task]], list[Weights]]]:
    """Trains a list of tasks; with several processes each gets two lots of them, so that lots may be unequal."""
    if processes == 1:
        yield lambda tasks: [train(task) for task in tasks]
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield lambda tasks: pool.map(train, tasks, chunksize=-(-len(tasks) // (2 * processes)))


def train(task: Task) -> Weights:
    """The site's weights after its epochs of SGD."""
    config, sites, network = _prepared(task[0])
    network.load_state_dict({name: torch.from_numpy(array) for name, array in task[3].items()})
    images = site_images(config, sites[task[1]])
    training = config.training
    optimiser = torch.optim.SGD(network.parameters(), lr=training.rate, momentum=training.momentum, foreach=True)
    generator = torch.Generator().manual_seed(1000 * task[2] + task[1])
    for _ in range(training.epochs):
        for batch in torch.randperm(len(images), generator=generator).split(training.batch):
            loss = F.cross_entropy(network(images.x[batch].float() / 255), images.y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return {name: tensor.numpy().copy() for name, tensor in network.state_dict().items()}


@functools.lru_cache(maxsize=1)
def _prepared(text: str) -> tuple[Config, list[Site], Network]:
    """What every task of this process needs."""
    config = from_json(text)
    torch.set_num_threads(config.engine.threads)
    return config, config.roster, architecture_of(config).build()
