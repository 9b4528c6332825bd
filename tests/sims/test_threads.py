"""Threads of one program: torch's global generators and defaults belong to the process, and no run changes another."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import nn

from fedloom import Result, run
from fedloom.clients.data.listing import run_now
from fedloom.clients.training.torch_setup import ordinary
from tests.sims.commands import SMALL

pytestmark = pytest.mark.usefixtures("blank_pictures")
WORDS = (
    *(word for word in SMALL if not word.startswith("network.")), "rounds=4", f"network.name={__name__}:Dropping",
    "training.augment=[{name: RandomAffine, degrees: 20}]",
)  # fmt: skip


class Dropping(nn.Module):
    def __init__(self, size: int, channels: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(size * size * channels, 64), nn.Dropout(0.5), nn.Linear(64, classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def together(*works: Callable[[], object]) -> list[Any]:
    """Call all at once, each in its own thread, and return what they return."""
    with ThreadPoolExecutor(len(works)) as threads:
        return [future.result() for future in [threads.submit(work) for work in works]]


def weights(result: Result) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in result.network.state_dict().items()}


def test_runs_in_threads_are_those_of_one_thread(tmp_path: Path):
    def trained(name: str, seed: int) -> dict[str, torch.Tensor]:
        return weights(run("digits", *WORDS, f"seed={seed}", f"run.root={tmp_path}", f"run.name={name}"))

    alone = trained("alone", 1)
    state = torch.get_rng_state()
    both = together(lambda: trained("first", 1), lambda: trained("second", 1), lambda: trained("other", 2))
    for weighed in both[:2]:
        assert all(torch.equal(alone[name], weighed[name]) for name in alone)
    assert not all(torch.equal(alone[name], both[2][name]) for name in alone)
    assert torch.equal(torch.get_rng_state(), state)
    assert run_now() == "", "no run is left in this process"


def test_reading_a_run_in_another_thread_does_not_change_the_one_that_trains(tmp_path: Path):
    first = run("digits", *WORDS, f"run.root={tmp_path}", "run.name=first")
    images = np.zeros((4, 1, 8, 8), dtype=np.uint8)
    done = threading.Event()

    def train() -> dict[str, torch.Tensor]:
        try:
            return weights(run("digits", *WORDS, f"run.root={tmp_path}", "run.name=second"))
        finally:
            done.set()

    def read() -> list[object]:
        seen = []
        while not done.is_set():
            seen = [first.network, first.predict(images)]
        return seen

    second, _ = together(train, read)
    assert all(torch.equal(tensor, second[name]) for name, tensor in weights(first).items())


def test_the_default_type_is_that_of_the_program_again_when_the_last_thread_leaves():
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        with ordinary():
            inside.set()
            leave.wait()

    torch.set_default_dtype(torch.float64)
    try:
        with ThreadPoolExecutor() as threads:
            try:
                with ordinary():
                    other = threads.submit(wait)
                    inside.wait()
                assert torch.get_default_dtype() == torch.float32, "the other thread is still inside"
            finally:
                leave.set()
            other.result()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_runs_on_ray_take_turns_and_none_ends_the_ray_of_another(tmp_path: Path):
    words = (*SMALL, "engine.name=ray", "engine.workers=1", "rounds=2", f"run.root={tmp_path}")
    both = together(*(lambda name=name: run("digits", *words, f"run.name={name}").metrics for name in ("first", "second")))
    strip = [[{key: value for key, value in record.items() if key != "seconds"} for record in metrics] for metrics in both]
    assert strip[0] == strip[1] and len(strip[0]) == 2
    assert not ray.is_initialized()


FORKS = """
import multiprocessing
import torch
from fedloom import run

def trained(name):
    words = ["engine.name=inline", "rounds=1", "data.test_limit=60", "run.root={root}"]
    torch.set_num_threads(2)
    return run("digits", *words, f"run.name={{name}}").summary["accuracy"]

first = trained("first")
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map(trained, ["second"]) == [first], torch.get_num_threads())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_can_train_and_does_not_hang(tmp_path: Path):
    script = tmp_path / "forks.py"
    script.write_text(FORKS.format(root=tmp_path))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True 2\n", done.stderr
