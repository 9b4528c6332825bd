"""Engines: the same seed gives the same bits whatever carries the messages; Ray is needed by its own engine only."""

import subprocess
import sys
from pathlib import Path

import pytest

from clients.states import read_state
from conf import UserError, load
from fusion.exact import digest
from server.experiment import run_experiment
from server.listener import LogListener
from sims.engines import open_engine
from sims.engines.adapter import FIRST_NODE, LocalGrid

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
    assert {"aggregate", "shared", "site-0000", "site-0001", "site-0002"} <= inline.keys()
    for workers in (1, 2):
        assert final_states(tmp_path, f"ray-{workers}", "engine.name=ray", f"engine.workers={workers}") == inline


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
