"""Engines: the same seed gives the same bits whatever carries the messages; Ray is needed by its own engine only."""

import contextlib
import dataclasses
import functools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from fedloom.clients.storage.states import read_state
from fedloom.conf import UserError, load
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.benchmarks.many_faults import bench, fault
from fedloom.sims.engines import open_engine
from fedloom.sims.engines.adapter import FIRST_NODE, LocalGrid
from fedloom.sims.engines.ray import workers_for
from tests.engines.parts import SITES, SMALL, final_states

pytestmark = pytest.mark.usefixtures("one_ray")


@pytest.fixture(scope="module")
def ray_with(tmp_path_factory: pytest.TempPathFactory, one_ray: None) -> Iterator[Callable[..., LocalGrid]]:
    """Ray engines by their options, each started once: its workers take longer to start than a small run."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def grid(*words: str) -> LocalGrid:
            root = f"run.root={tmp_path_factory.mktemp('engine')}"
            return stack.enter_context(open_engine(load("digits", [SITES, "engine.num_cpus=0", *words, root])))

        yield grid


@pytest.mark.slow
def test_inline_and_ray_give_the_same_bits(tmp_path: Path, ray_with: Callable[..., LocalGrid]):
    inline = final_states(tmp_path, "inline", "engine.name=inline")
    assert {"aggregate", "site-0000", "site-0001", "site-0002"} <= inline.keys()
    assert final_states(tmp_path, "ray", "engine.name=ray", grid=ray_with("engine.workers=2")) == inline


@pytest.mark.slow
def test_the_options_of_training_give_the_same_bits_on_ray(tmp_path: Path, ray_with: Callable[..., LocalGrid]):
    words = ["training.optimizer={name: adamw, betas: [0.9, 0.95]}", "training.schedule.warm_up=1", "training.rate=0.01",
             "training.augment=[{name: RandomCrop, size: 8, padding: 1}, RandomHorizontalFlip]", "training.precision=bf16",
             "training.label_smoothing=0.1", "training.channels_last=true"]  # fmt: skip
    inline = final_states(tmp_path, "inline", "engine.name=inline", *words)
    assert final_states(tmp_path, "ray", "engine.name=ray", *words, grid=ray_with("engine.workers=2")) == inline


def test_a_ray_that_was_there_is_used_and_kept(tmp_path: Path):
    config = load("digits", ["engine.name=ray", "engine.workers=2", f"run.root={tmp_path}"])
    with open_engine(config) as grid:
        assert "2 workers" in grid.describe()
        while ray.available_resources().get("CPU", 0) > 0:  # both have theirs
            time.sleep(0.1)
    assert ray.is_initialized()
    while ray.available_resources().get("CPU", 0) < 2:  # and have given it back
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [("engine.address=127.0.0.1:1", "Ray runs in this process already"), ("engine.workers=3", "has room for 2")],
)
def test_what_does_not_fit_a_ray_that_was_there_is_refused_and_leaves_it(tmp_path: Path, words: str, message: str):
    config = load("digits", ["engine.name=ray", words, f"run.root={tmp_path}"])
    with pytest.raises(UserError, match=message), open_engine(config):
        pass
    assert ray.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "fedavg", "independent", "regularised"])
def test_partial_sums_of_one_worker_give_the_same_bits(tmp_path: Path, ray_with: Callable[..., LocalGrid], mode: str):
    words = [f"objective.mode={mode}", "objective.initialisation=own", "strategy.weighting=samples"]
    words += ["network.standardise=false", "network.affine=true"]
    whole = final_states(tmp_path, "whole", "engine.name=inline", *words)
    parts = ["engine.workers=1", "federation.partial_sums=true"]
    assert final_states(tmp_path, f"parts-{mode}", *parts, *words, grid=ray_with(*parts)) == whole


class Stopping(LogListener):
    """A listener that stops the run after its first round."""

    def round_done(self, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("options", [["federation.partial_sums=true"], ["engine.vectorise=3"]], ids=["sums", "vectorise"])
def test_a_site_without_its_store_begins_at_its_contribution_on_every_engine(tmp_path: Path, options: list[str]):
    """A run is stopped, one site's store lost, the run resumed: the bits are those of the inline engine."""
    alike = ["sites=[{domain: digits, count: 3, samples: 40}]", "training.rate=0.01"]
    engines = {"inline": ["engine.name=inline"], "ray": ["engine.name=ray", "engine.workers=1", *options]}
    for name, engine in engines.items():
        config = load("digits", [*SMALL[:1], *SMALL[3:], *alike, *engine, f"run.root={tmp_path}", f"run.name={name}"])
        with open_engine(config) as grid:
            for listener in (Stopping(), LogListener()):
                with contextlib.suppress(KeyboardInterrupt):
                    run_experiment(grid, config, listener)
                (store,) = (tmp_path / name / "sites").iterdir()
                assert len(list(store.iterdir())) == 3
                shutil.rmtree(store / "site-0001")
                config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
        assert check(tmp_path / name) == []
    one, other = (read_state(tmp_path / name / "states" / "aggregate.safetensors") for name in engines)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5 if "vectorise" in options[0] else 0)


def test_workers_fill_what_there_is_and_no_more():
    engine = load("digits", ["engine.num_cpus=2", "engine.num_gpus=0.25"]).engine
    plenty = {"CPU": 16.0, "GPU": 4.0, "memory": 64 * 2.0**30}
    assert workers_for(engine, plenty) == 8
    assert workers_for(engine, {**plenty, "GPU": 1.0}) == 4
    assert workers_for(engine, {**plenty, "memory": 3.5 * 2**30}) == 3
    assert workers_for(engine, {}) == 1


def test_everything_but_the_ray_engine_works_without_ray(tmp_path: Path):
    script = f"""
import sys
import time
sys.modules["ray"] = None  # as if it were not installed
from fedloom.conf import load
from fedloom.sims.operations.simulate import simulate
import fedloom.server.app, fedloom.clients.app, fedloom.sims.cli.main
simulate(load("digits", {[*SMALL, "engine.name=inline", f"run.root={tmp_path}"]!r}))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert (tmp_path / "digits" / "report.html").is_file()


def test_the_flower_engine_is_started_by_flwr_run():
    with pytest.raises(UserError, match="flwr run"), open_engine(load("digits", ["engine.name=flower"])):
        pass


def test_nodes_are_the_sites_in_order(tmp_path: Path):
    with open_engine(load("digits", ["engine.name=inline", f"run.root={tmp_path}"])) as grid:
        assert isinstance(grid, LocalGrid)
        assert list(grid.get_node_ids()) == [FIRST_NODE, FIRST_NODE + 1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "fedavg"])
def test_sites_trained_as_one_agree_with_sites_trained_in_turn(
    tmp_path: Path, ray_with: Callable[..., LocalGrid], mode: str
):
    sites = "sites=[{domain: digits, count: 4, samples: 40}, {domain: digits, samples: 30}]"
    words = [sites, f"objective.mode={mode}", "rounds=1", "training.rate=0.01"]
    final_states(tmp_path, "in-turn", "engine.name=inline", *words)
    one_worker = ray_with("engine.workers=1", "engine.vectorise=4", sites)
    final_states(tmp_path, f"as-one-{mode}", "engine.vectorise=4", *words, grid=one_worker)
    one, other = (read_state(tmp_path / name / "states" / "aggregate.safetensors") for name in ("in-turn", f"as-one-{mode}"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_with_seeded_faults_names_them_all_and_leaves_the_bits_of_the_inline_engine():
    _, (inline, over_ray) = bench(sites=40, rounds=2)
    planned = {(round, site) for round in (1, 2) for site in range(40) if fault(site, round)}
    assert {fault(site, round) for round, site in planned} == {"raise", "kill"}
    assert inline["failed"] == over_ray["failed"] == len(planned)
    assert inline["digest"] == over_ray["digest"]
