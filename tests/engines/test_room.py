"""Workers that no machine has a place for are refused at the start, not waited for."""

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from fedloom.conf import UserError, load
from fedloom.sims.engines import open_engine
from fedloom.sims.engines.gpu_room import needs_of, refuse_full
from fedloom.sims.operations.simulate import refuse
from tests.engines.parts import SITES


class Busy:
    """Takes all there is."""

    def here(self) -> bool:
        return True


def opened(root: Path, *words: str) -> None:
    with open_engine(load("digits", ["engine.name=ray", SITES, f"run.root={root}", *words])):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("given", ["1", "0.25", "2"])
def test_gpus_that_are_not_there_are_refused_before_ray_starts(tmp_path: Path, given: str):
    words = ["engine.name=ray", f"engine.num_gpus={given}", f"run.root={tmp_path}"]
    ray.shutdown()  # of other files
    with pytest.raises(UserError, match=rf"engine\.num_gpus: got {given}, and this machine has no GPU .*; take 0 at most"):
        refuse(load("digits", words))
    with pytest.raises(UserError, match=r"engine\.num_gpus: got"):
        opened(tmp_path, f"engine.num_gpus={given}")
    assert not ray.is_initialized()


@pytest.mark.usefixtures("one_ray")
@pytest.mark.parametrize("words, message", [
    (["engine.num_gpus=1"], r"engine\.num_gpus: got 1, and no machine of this Ray has more than 0 GPUs; take 0 at most"),
    (["engine.num_cpus=3"], r"engine\.num_cpus: got 3, and no machine of this Ray has more than 2 CPUs; take 2 at most"),
])  # fmt: skip
def test_what_no_machine_of_a_ray_has_is_refused(words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        refuse_full(load("digits", words).engine, patience=0.0)


@pytest.mark.usefixtures("one_ray")
def test_a_ray_that_is_full_is_refused_and_stays(tmp_path: Path):
    remote: Any = ray.remote
    busy = remote(num_cpus=2)(Busy).remote()
    assert ray.get(busy.here.remote())
    try:
        with pytest.raises(
            UserError, match=r"engine\.num_cpus: a worker takes 1, and of this Ray's 2 CPUs 0 are free; wait"
        ):
            opened(tmp_path)
        assert ray.is_initialized()
    finally:
        ray.kill(busy)
    opened(tmp_path, "engine.workers=1")


def test_what_workers_share_is_not_a_need():
    assert needs_of(load("digits", ["engine.num_cpus=0"]).engine) == {}
