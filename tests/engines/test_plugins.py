"""Methods of the user's own: one default of an option, known to workers and the server; errors come before data are read."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.conf import UserError, load
from fedloom.conf.loading import to_yaml
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run_folder.folder import CONFIG
from fedloom.sims.engines import open_engine
from fedloom.sims.engines.ray import own_paths, plugins_of
from fedloom.sims.operations.simulate import simulate

MODULE = """
import time
from dataclasses import dataclass

from fedloom.clients.objectives import OBJECTIVES
from fedloom.clients.objectives.sum_aggregation import SumAggregation
from fedloom.conf.typed import option


@OBJECTIVES.register("averaging")
@dataclass(frozen=True)
class Averaging(SumAggregation):
    mode: str = option("fedavg", "another default")


@OBJECTIVES.register("dozing")
@dataclass(frozen=True)
class Dozing(SumAggregation):
    def session(self, task):
        if task.site.name == "site-0001":
            time.sleep(3600)
        return super().session(task)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A module outside the project that registers an objective; workers learn where it is."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "my_objectives.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.import_module("my_objectives")
        yield "my_objectives"
    sys.modules.pop("my_objectives")


def small(root: Path, *words: str) -> list[str]:
    sites = "sites=[{domain: digits, count: 2, samples: 20}]"
    return [sites, "data.size=8", "rounds=1", "baselines=[]", "data.test_limit=50", f"run.root={root}", *words]


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
def test_an_objectives_own_default_counts_for_both_halves_and_workers_know_it(tmp_path: Path, plugin: str):
    """The server took another default than the sites; and Ray's workers did not know the objective."""
    summaries = []
    for engine in ("inline", "ray"):
        words = ["objective={name: averaging}", f"engine.name={engine}", "engine.workers=1", f"run.name={engine}"]
        config = load("digits", small(tmp_path, *words))
        with open_engine(config) as grid:
            summaries.append(run_experiment(grid, config, LogListener()))
    assert plugins_of(config) == (plugin,)
    assert summaries[0]["aggregate"] == "fedavg"
    assert summaries[0]["digest"] == summaries[1]["digest"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
def test_a_site_that_hangs_while_several_are_trained_as_one_is_found_and_dropped(tmp_path: Path, plugin: str):
    """Once nobody's time was up there."""
    words = [
        "objective={name: dozing}",
        "engine.name=ray",
        "engine.workers=1",
        "engine.vectorise=2",
        "engine.task_timeout=4",
    ]
    config, records = load("digits", small(tmp_path, *words)), []
    listener = LogListener()
    listener.round_done = records.append  # type: ignore[method-assign]
    with open_engine(config) as grid:
        run_experiment(grid, config, listener)
    assert records[0]["dropped"] == {"site-0001": "took longer than engine.task_timeout=4 s"}
    assert records[0]["replies"] == 1


def test_a_mode_that_the_server_does_not_know_is_reported_before_anything_starts(tmp_path: Path):
    with pytest.raises(UserError, match=r"objective\.mode: got 'other'"):
        simulate(load("digits", small(tmp_path, "objective.mode=other", "engine.name=inline")))


def test_what_is_registered_in_a_script_is_refused_where_workers_would_have_to_import_it(
    tmp_path: Path, plugin: str, monkeypatch: pytest.MonkeyPatch
):
    kind = importlib.import_module(plugin).Averaging
    monkeypatch.setattr(kind, "__module__", "__main__")
    config = load("digits", small(tmp_path, "objective={name: averaging}", "engine.name=ray"))
    with pytest.raises(UserError, match=r"objective 'averaging': is registered in the script itself.*engine\.name=inline"):
        plugins_of(config)


def test_workers_import_all_that_a_configuration_names_from_outside_and_nothing_else(
    tmp_path: Path, plugin: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("my_nets", "my_images", "my_ways"):
        (tmp_path / f"{name}.py").write_text("def thing(*given):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    sites = [
        "{domain: digits, network: {name: 'my_nets:thing'}}",
        "{domain: 'my_images:thing'}",
        "{domain: 'images:/nowhere', count: 2, partition: {name: 'my_ways:thing'}}",
    ]
    words = [f"sites=[{', '.join(sites)}]", "network={name: 'torchvision.models:resnet18'}", "objective={name: averaging}"]
    config = load("digits", words)
    assert plugins_of(config) == ("my_images", "my_nets", plugin, "my_ways", "torchvision.models")
    assert plugins_of(load("digits")) == ()
    assert plugins_of(load("digits", ["objective={name: 'sims.benchmarks.attack_sites:Hostile'}"])) == ()  # an earlier name
    assert own_paths()[0] == str(tmp_path) and not any(path.startswith(sys.prefix) for path in own_paths())
    for word in ("network={name: '__main__:Net'}", "sites.1.domain='__main__:load'"):
        with pytest.raises(UserError, match=r"'__main__:\w+': is registered in the script itself"):
            plugins_of(load("digits", [*words, word]))


def test_a_run_that_exists_is_refused_before_any_data_are_read(tmp_path: Path):
    """It took a quarter of a minute to say so, with larger data."""
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / CONFIG).write_text(to_yaml(load("digits")))
    words = small(tmp_path, "engine.name=inline")
    words[0] = "sites=[{domain: usps, count: 2}]"
    nowhere = load("digits", [*words, f"data.root={tmp_path / 'no-such-folder'}"])
    with pytest.raises(UserError, match=r"the run 'digits' exists"):
        simulate(nowhere)
    with pytest.raises(UserError, match=r"the run 'digits' exists"):
        run_experiment(None, nowhere, LogListener())  # type: ignore[arg-type]  # as the ServerApp does
