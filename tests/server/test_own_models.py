"""The models of a strategy of the user's own: what is no model, or cannot be written to a file of its name, is refused."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.conf import Config, UserError, load
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run_folder.folder import is_file_name
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid

MODULE = """
from dataclasses import dataclass
from fedloom.server.strategies import RecordSpec, Model, Models, Strategy, Sum, MEAN, SITE, TRAIN
from fedloom.conf.typed import option

@dataclass(frozen=True)
class Own(Strategy):
    what: str = option("good", "what models() gives")
    def slots(self, experiment): return {"networks": Sum()}
    def begin(self, run): run.put_all("networks", run.initial())
    def round(self, run): run.gather(TRAIN, {MEAN: run.mean("networks")}, {SITE: RecordSpec(slot="networks")})
    def models(self, view):
        def mean(): return Model(view.architecture(), view.mean("networks"))
        def lacking(): return Model(view.architecture(), {"head.bias": view.initial()["head.bias"]})
        given = {"nothing": None, "dict": {"own": mean}, "no model": {"own": view.initial}, "lacking": {"own": lacking}}
        names = {"path": "../../evil", "reserved": "aggregate"}
        found = given.get(self.what, {"own": mean, names.get(self.what, "other"): mean})
        return Models(found) if self.what not in ("nothing", "dict") else found
"""


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_models", None)


def configured(root: Path, what: str) -> Config:
    sites = "sites=[{domain: digits, samples: 20, count: 2}]"
    small = ["rounds=1", "data.size=8", "network={name: mlp, widths: [4]}", "objective={name: local}", "baselines=[]"]
    strategy = f"strategy={{name: 'own_models:Own', what: {what}}}"
    return load("digits", [sites, *small, strategy, "data.test_limit=20", f"run.root={root}/a/b", "engine.name=inline"])


def finished(config: Config) -> dict[str, Any]:
    return run_experiment(InlineGrid(2, store_folder(config)), config, LogListener())


def test_the_first_is_the_aggregate_and_others_have_files_of_their_names(tmp_path: Path):
    assert list(finished(configured(tmp_path, "good"))["accuracy"]) == ["own", "other"]
    assert {path.name for path in tmp_path.rglob("states/*")} == {"aggregate.safetensors", "other.safetensors"}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", r"models\(\) must return a fedloom\.server\.strategies\.Models, not a NoneType"),
        ("dict", r"must return a fedloom\.server\.strategies\.Models, not a dict"),
        ("no model", r"its models\(\) must hold fedloom\.server\.strategies\.Model, one is a dict"),
        ("lacking", r"Model with the state of its architecture \(.*Missing key\(s\).*head\.weight"),
        ("path", r"names a network '\.\./\.\./evil', which is not a valid file name; choose another name"),
        ("reserved", r"names a network 'aggregate', the file name of the first one"),
    ],
)
def test_other_things_are_refused_in_one_line_that_names_the_strategy(tmp_path: Path, what: str, message: str):
    with pytest.raises(UserError, match=rf"^strategy 'own_models:Own': .*{message}") as caught:
        finished(configured(tmp_path, what))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a\\b", "a\nb", "\x1b[31m", "é" * 51, "\ud800", 3])
def test_names_that_are_not_files(name: object):
    assert not is_file_name(name)
    assert is_file_name("own (mean) é")
