"""Engines: the same seed gives the same bits whatever carries the messages; Ray is needed by its own engine only."""

import contextlib
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from flwr.app import RecordDict
from ray.cluster_utils import Cluster

from clients.initial import initial_state
from clients.messages import MEAN, ORDER, Order, to_arrays
from clients.states import read_state
from conf import UserError, load, to_json
from conf.sites import roster
from fusion.exact import digest
from server.audit import check
from server.experiment import run_experiment
from server.federation import Federation
from server.listener import LogListener
from sims.engines import open_engine
from sims.engines.adapter import FIRST_NODE, LocalGrid
from sims.engines.ray import workers_for

SMALL = ["rounds=2", "sites.0.samples=120", "sites.1.samples=100", "data.size=8", "baselines=[]"]
SITES = "sites=[{domain: digits, samples: 60}, {domain: digits, rotation: 90, samples: 90}, {domain: digits, samples: 30}]"


def final_states(folder: Path, name: str, *engine: str) -> dict[str, str]:
    """Digests of all final states of a small run on an engine, and of its exact sum."""
    config = load(
        "digits", [*SMALL, SITES, *engine, f"run.root={folder}", f"run.name={name}", "objective.subset_probability=0.5"]
    )
    with open_engine(config) as grid:
        summary = run_experiment(grid, config, LogListener())
    files = sorted((folder / name / "states").glob("*.safetensors"))
    return {"sum": summary["digest"]["sum"], **{file.stem: digest(read_state(file)) for file in files}}


@pytest.mark.slow
def test_inline_and_ray_with_one_and_two_workers_give_the_same_bits(tmp_path: Path):
    inline = final_states(tmp_path, "inline", "engine.name=inline")
    assert {"aggregate", "site-0000", "site-0001", "site-0002"} <= inline.keys()
    for workers in (1, 2):
        assert final_states(tmp_path, f"ray-{workers}", "engine.name=ray", f"engine.workers={workers}") == inline


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "fedavg", "independent", "regularised"])
def test_partial_sums_give_the_same_bits(tmp_path: Path, mode: str):
    words = [f"objective.mode={mode}", "objective.initialisation=own", "strategy.weighting=samples"]
    words += ["network.standardise=false", "network.affine=true"]
    whole = final_states(tmp_path, "whole", "engine.name=inline", *words)
    parts = ["engine.name=ray", "engine.workers=1", "federation.partial_sums=true"]
    assert final_states(tmp_path, "parts", *parts, *words) == whole


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
        for listener in (Stopping(), LogListener()):
            with open_engine(config) as grid, contextlib.suppress(KeyboardInterrupt):
                run_experiment(grid, config, listener)
            (store,) = (tmp_path / name / "sites").iterdir()
            assert len(list(store.iterdir())) == 3
            shutil.rmtree(store / "site-0001")
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
        assert check(tmp_path / name) == []
    one, other = (read_state(tmp_path / name / "states" / "aggregate.safetensors") for name in engines)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5 if "vectorise" in options[0] else 0)


@pytest.mark.slow
def test_a_cluster_of_two_nodes_gives_the_bits_of_the_inline_engine(tmp_path: Path):
    inline = final_states(tmp_path, "inline", "engine.name=inline")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        config = ["engine.name=ray", f"engine.address={cluster.address}", "engine.workers=2"]
        assert final_states(tmp_path, "cluster", *config) == inline
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_data_shipped_to_a_cluster_is_read_there(tmp_path: Path):
    """The data folder is gone when the sites train: the only copy left is the one that Ray has shipped."""
    data, random = tmp_path / "data", np.random.default_rng(0)
    data.mkdir()
    pixels, labels = random.integers(0, 256, (40, 16, 16), np.uint8), np.arange(40, dtype=np.uint8) % 10
    np.savez(data / "usps.npz", X_train=pixels, y_train=labels, X_test=pixels, y_test=labels)
    words = [f"data.root={data}", "sites=[{domain: usps, count: 2}]", "data.size=8", "rounds=2", "evaluation.every=2"]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        there = [f"engine.address={cluster.address}", "engine.ship_data=true", "engine.workers=1"]
        config = load("digits", [*words, *there, f"run.root={tmp_path}"])
        with open_engine(config) as grid:
            data.rename(tmp_path / "elsewhere")
            federation = Federation(grid, roster(config), window=0)
            federation.join(timeout=60)
            order = Order(to_json(config), "run", site=0, round=1, base=0, members=2).record()
            mean = to_arrays(initial_state(config))
            replies = list(federation.train([(roster(config)[0], RecordDict({ORDER: order, MEAN: mean}))], 1, timeout=60))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [reply.reason for reply in replies] == [""]


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
sys.modules["ray"] = None  # as if it were not installed
from conf import load
from sims.simulate import simulate
import server.app, clients.app, sims.cli
simulate(load("digits", {[*SMALL, "engine.name=inline", f"run.root={tmp_path}"]!r}), quiet=True)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert (tmp_path / "digits" / "report.html").is_file()


def test_a_cluster_that_is_not_there_is_one_clear_line(tmp_path: Path):
    config = load("digits", ["engine.name=ray", "engine.address=127.0.0.1:1", f"run.root={tmp_path}"])
    with pytest.raises(UserError, match=r"Ray did not start \(.*engine.name=inline") as caught, open_engine(config):
        pass
    assert "\n" not in str(caught.value)


def test_the_flower_engine_is_started_by_flwr_run():
    with pytest.raises(UserError, match="flwr run"), open_engine(load("digits", ["engine.name=flower"])):
        pass


def test_nodes_are_the_sites_in_order(tmp_path: Path):
    with open_engine(load("digits", ["engine.name=inline", f"run.root={tmp_path}"])) as grid:
        assert isinstance(grid, LocalGrid)
        assert list(grid.get_node_ids()) == [FIRST_NODE, FIRST_NODE + 1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "fedavg"])
def test_sites_trained_as_one_agree_with_sites_trained_in_turn(tmp_path: Path, mode: str):
    sites = "sites=[{domain: digits, count: 4, samples: 40}, {domain: digits, samples: 30}]"
    words = [sites, f"objective.mode={mode}", "rounds=1", "training.rate=0.01"]
    final_states(tmp_path, "in-turn", "engine.name=inline", *words)
    final_states(tmp_path, "as-one", "engine.name=ray", "engine.workers=1", "engine.vectorise=4", *words)
    one, other = (read_state(tmp_path / name / "states" / "aggregate.safetensors") for name in ("in-turn", "as-one"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)
