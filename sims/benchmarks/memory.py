"""`fedloom bench memory`: peak memory against the number of sites.

The first table is of the server: sites send 4 MB each without training. The second is of all processes of a training run.
"""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedloom.conf import load
from fedloom.server.run.training_run import all_rounds
from fedloom.sims.benchmarks import untrained
from fedloom.sims.benchmarks.measuring import MIB, fresh, nbytes, peak_mib, small_sites, table
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.scratch_run import joined_channel, round_loop
from fedloom.sims.progress.memory import tree_bytes
from fedloom.sims.report.tables import Table

ROUNDS = 2
COLUMNS = {"sites": "{sites}", "a site's state, MiB": "{state_mb:.1f}", "RSS before the first round, MiB": "{start_mb:.1f}",
           f"peak RSS, {ROUNDS} rounds, MiB": "{peak_mb:.1f}"}  # fmt: skip
TRAINED = ((50, "inline"), (500, "inline"), (50, "ray"), (500, "ray"))  # sites and engine
IMAGES, CLASSES, EVERY = 50_000, 100, 0.1  # training images of 32 x 32; seconds between samples
MOST_TOGETHER = 2560  # MiB


def bench(counts: tuple[int, ...] = (10, 200)) -> tuple[list[Table], list[dict[str, Any]]]:
    """Measure peak memory: of a server with each number of sites in `counts`, and of whole training runs.

    Each case runs in a fresh process, with real rounds and files. Returns the tables and their rows.
    """
    rows = [fresh("memory:measure", sites) for sites in counts]
    served = table("Server memory", COLUMNS, rows, "sum aggregation, inline engine, window 8, no training")
    trained = [fresh("memory:together", *case) for case in TRAINED]
    note = (f"FedAvg of a network with four layers, {ROUNDS} rounds of 10 sites, which share {IMAGES:,} images "
            f"of 32 x 32 in {CLASSES} classes; Ray has two workers. Bar: at most {MOST_TOGETHER:,} MiB.")  # fmt: skip
    columns = {"sites": "{sites}", "engine": "{engine}", "peak of all processes, MiB": "{peak_mb:.0f}"}
    return [served, table("Memory of a training run", columns, trained, note)], [*rows, *trained]


def measure(sites: int) -> dict[str, float]:
    """Run the rounds in this process and return its peak memory before and after them, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"rounds={ROUNDS}", "network.width=3.75", "federation.window=8", f"run.root={folder}"]
        config = load("digits", ["engine.name=inline", small_sites(sites), *overrides])
        grid = InlineGrid(sites, Path(folder), untrained.app)
        loop = round_loop(config, "memory", joined_channel(grid, config, 10.0), Path(folder))
        size, start = nbytes(loop.state.aggregate().state), peak_mib()
        list(all_rounds(loop))
    return {"sites": sites, "state_mb": size / MIB, "start_mb": start, "peak_mb": peak_mib()}


def images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return random training and test images, uint8 [n, 32, 32, 3], with their classes: a domain."""
    draw = np.random.default_rng(0)
    sizes = {"train": IMAGES, "test": 1000}
    return {part: (draw.integers(0, 256, (n, 32, 32, 3), np.uint8), np.arange(n) % CLASSES) for part, n in sizes.items()}


def network() -> nn.Module:
    """Return a network of two convolutional and two linear layers for images [n, 3, 32, 32]."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
    )


def together(sites: int, engine: str) -> dict[str, Any]:
    """Train on an engine, and return the peak memory of this process and all that it starts, in MiB."""
    from fedloom.sims.api import run

    here = f"fedloom.sims.benchmarks.{Path(__file__).stem}"
    with tempfile.TemporaryDirectory() as folder, _sampled() as samples:
        config = {
            "sites": [{"domain": f"{here}:images", "count": sites}], "network": {"name": f"{here}:network"},
            "strategy": "fedavg", "objective": "fedavg", "data": {"size": 32, "grey": False},
            "federation": {"fraction": 10 / sites}, "evaluation": {"every": ROUNDS, "sites": 0},
            "rounds": ROUNDS, "run": {"root": folder},
            "engine": {"name": engine, "workers": 2},
        }  # fmt: skip
        run(config)
    return {"sites": sites, "engine": engine, "peak_mb": max(samples) / MIB}


@contextlib.contextmanager
def _sampled() -> Iterator[list[int]]:
    """Yield a list to which a thread adds the bytes of this process and its children; shared memory counts once."""
    samples, ended = [tree_bytes()], threading.Event()

    def sample() -> None:
        while not ended.wait(EVERY):
            samples.append(tree_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
