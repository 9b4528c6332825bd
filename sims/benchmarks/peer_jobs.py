"""The job of `fedloom bench peers` in each peer, as a user of that peer would write it.

100 sites of 60 images, 20 sites in each round, one epoch of SGD in batches of 32, a network of SIZES. The images are
random: they do not change the time. Each function runs the rounds in this process (and its workers), and returns the seconds
of each.
"""
# pyright: reportMissingImports=false

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = "fedloom.sims.benchmarks.peer_jobs"
SITES, ASKED, IMAGES, BATCH, RATE = 100, 20, 60, 32, 0.05
WORKERS = 2
RAY = ("engine.name=ray", f"engine.workers={WORKERS}")
UNSTORED = "strategy.forgettable=false"


def network() -> nn.Module:
    """Return a convolutional network of 69,742 weights for images [n, 1, 28, 28] of ten classes."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 108), nn.ReLU(), nn.Linear(108, 10)),
    )


class Block(nn.Module):
    """A residual block of two 3x3 convolutions with GroupNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(4, outputs)),
        )
        self.skip = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.skip(x))


def large_network() -> nn.Module:
    """Return a ResNet-18 of a quarter of its width (2.8 MB) for images [n, 3, 32, 32] of ten classes."""
    widths = [16, 16, 16, 32, 32, 64, 64, 128, 128]
    blocks = [Block(a, b, 2 if a != b else 1) for a, b in pairwise(widths)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU(), *blocks,
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))  # fmt: skip


def images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return random training and test images, uint8 [n, 28, 28], with their classes. A domain of the Fedloom runs."""
    return _random(28, 28)


def large_images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the same with images [n, 32, 32, 3]."""
    return _random(32, 32, 3)


def _random(*shape: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    sizes = {"train": SITES * IMAGES, "test": 100}
    return {part: (draw.integers(0, 256, (n, *shape), np.uint8), np.arange(n) % 10) for part, n in sizes.items()}


@dataclass(frozen=True)
class Size:
    """The network of a job, and its images."""

    network: Callable[[], nn.Module]
    images: Callable[[], dict[str, tuple[np.ndarray, np.ndarray]]]
    side: int
    grey: bool

    def site_tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Return the images of each site, float32 [60, channels, side, side], and their classes."""
        x, y = self.images()["train"]
        inputs = torch.from_numpy(x).float().div(127.5).sub(1).view(len(x), self.side, self.side, -1).movedim(3, 1)
        return list(zip(inputs.contiguous().split(IMAGES), torch.from_numpy(y).split(IMAGES), strict=True))


SIZES = {"small": Size(network, images, 28, True), "large": Size(large_network, large_images, 32, False)}


# Plain loops


def train(net: nn.Module, x: Tensor, y: Tensor) -> None:
    """Train for an epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for batch in torch.randperm(len(y)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()


def sum_over(net: nn.Module, start: Tensor, sites: list[int], data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Train each site from the weights `start`, and return the sum of their weights."""
    total = torch.zeros_like(start)
    for site in sites:
        nn.utils.vector_to_parameters(start.clone(), net.parameters())
        train(net, *data[site])
        total += nn.utils.parameters_to_vector(net.parameters()).detach()
    return total


def one_process(size: str, rounds: int) -> list[float]:
    """Return the seconds of each round of a plain loop in one process."""
    torch.set_num_threads(1)
    net, data, draw, seconds = SIZES[size].network(), SIZES[size].site_tensors(), np.random.default_rng(0), []
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    for _ in range(rounds):
        begin = time.perf_counter()
        weights = sum_over(net, weights, draw.choice(SITES, ASKED, replace=False).tolist(), data) / ASKED
        seconds.append(time.perf_counter() - begin)
    return seconds


def _worker(pipe: Any, size: str) -> None:
    torch.set_num_threads(1)
    net, data = SIZES[size].network(), SIZES[size].site_tensors()
    while (order := pipe.recv()) is not None:
        pipe.send(sum_over(net, torch.from_numpy(order[0]), order[1], data).numpy())


def two_processes(size: str, rounds: int) -> list[float]:
    """Return the seconds of each round of a plain loop that shares the sites of a round between two processes."""
    start, draw, seconds = multiprocessing.get_context("spawn"), np.random.default_rng(0), []
    pipes = [start.Pipe() for _ in range(WORKERS)]
    workers = [start.Process(target=_worker, args=(theirs, size), daemon=True) for _, theirs in pipes]
    for worker in workers:
        worker.start()
    weights = nn.utils.parameters_to_vector(SIZES[size].network().parameters()).detach().numpy()
    for _ in range(rounds):
        begin, chosen = time.perf_counter(), draw.choice(SITES, ASKED, replace=False).tolist()
        for number, (pipe, _) in enumerate(pipes):
            pipe.send((weights, chosen[number::WORKERS]))
        weights = sum(pipe.recv() for pipe, _ in pipes) / np.float32(ASKED)
        seconds.append(time.perf_counter() - begin)
    for pipe, _ in pipes:
        pipe.send(None)
    return seconds


# Fedloom


def fedloom(size: str, rounds: int, *overrides: str) -> list[float]:
    """FedAvg of Fedloom, with sums and contributions on disk, so that each site can be forgotten exactly."""
    import tempfile

    from fedloom.sims.api import run

    times: list[float] = []
    job = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "sites": [{"domain": f"{HERE}:{job.images.__name__}", "count": SITES}],
            "network": {"name": f"{HERE}:{job.network.__name__}"}, "data": {"size": job.side, "grey": job.grey},
            "strategy": "fedavg", "objective": "fedavg", "federation": {"fraction": ASKED / SITES},
            "training": {"batch": BATCH, "epochs": 1, "rate": RATE, "momentum": 0.0, "schedule": "constant"},
            "evaluation": {"every": 10**6, "sites": 0}, "rounds": rounds, "run": {"root": folder},
        }  # fmt: skip
        run(config, *overrides, on_round=lambda record: times.append(time.perf_counter()))
    return np.diff(times).tolist()


def inline(size: str, rounds: int) -> list[float]:
    """Return the seconds of each round of Fedloom in one process."""
    return fedloom(size, rounds, "engine.name=inline")


def ray(size: str, rounds: int) -> list[float]:
    """Return the seconds of each round of Fedloom with two Ray workers."""
    return fedloom(size, rounds, *RAY)


def inline_unstored(size: str, rounds: int) -> list[float]:
    """Return the seconds of each round of Fedloom in one process, without contributions on disk."""
    return fedloom(size, rounds, "engine.name=inline", UNSTORED)


def ray_unstored(size: str, rounds: int) -> list[float]:
    """Return the seconds of each round of Fedloom with two Ray workers, without contributions on disk."""
    return fedloom(size, rounds, *RAY, UNSTORED)


# Others


def flower(size: str, rounds: int) -> list[float]:
    """Return the seconds of each round of Flower's simulation with its own FedAvg; a Ray actor on each of two CPUs."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from fedloom.sims.engines.local_ray import loopback

    client, server, times = ClientApp(), ServerApp(), list[float]()

    @client.train()
    def _(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        net = SIZES[size].network()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
        train(net, *_tensors(size)[int(context.node_config["partition-id"])])
        record = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": IMAGES})})
        return Message(record, reply_to=message)

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        FedAvg(fraction_train=ASKED / SITES, fraction_evaluate=0.0).start(
            grid, ArrayRecord(SIZES[size].network().state_dict()), num_rounds=rounds,
            evaluate_fn=lambda number, arrays: times.append(time.perf_counter()),
        )  # fmt: skip

    with loopback():
        run_simulation(
            server, client, SITES,
            backend_config={"init_args": {"address": "local"}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )  # fmt: skip
    return np.diff(times).tolist()


_DATA: list[tuple[Tensor, Tensor]] = []


def _tensors(size: str) -> list[tuple[Tensor, Tensor]]:
    if not _DATA:
        _DATA.extend(SIZES[size].site_tensors())
    return _DATA


def pfl(size: str, rounds: int) -> list[float]:
    """Return the seconds of each round of pfl-research in one process, or in two by torchrun."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.internal.ops.selector import set_framework_module
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = SIZES[size].network()

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            return F.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            times.append(time.perf_counter())
            return False, Metrics()

    times: list[float] = []
    torch.set_num_threads(1)
    set_framework_module(pytorch_ops)
    np.random.seed(0)  # noqa: NPY002  # pfl draws from it; the same on all workers
    torch.manual_seed(0)
    data, model = _tensors(size), Model()
    sampler = get_user_sampler("random", list(range(SITES)))
    users = FederatedDataset(lambda user: Dataset(raw_data=list(data[user]), user_id=str(user)), sampler)
    pytorch = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(rounds, 10**6, ASKED, 0),
        backend=SimulatedBackend(training_data=users, val_data=users), model=pytorch,
        model_train_params=NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE),
        callbacks=[Clock()],
    )  # fmt: skip
    return np.diff(times).tolist()


PEERS = {
    "plain loop, one process": one_process, "plain loop, two processes": two_processes,
    "Fedloom, inline": inline, "Fedloom, Ray": ray,
    "Fedloom, inline, not forgettable": inline_unstored, "Fedloom, Ray, not forgettable": ray_unstored,
    "Flower": flower, "pfl-research, one process": pfl, "pfl-research, two processes": pfl,
}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(PEERS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))), flush=True)
