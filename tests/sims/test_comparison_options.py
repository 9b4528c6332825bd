"""The options that a comparison compares: one value for each, whatever its spelling, and the names of rows."""

import csv
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom import compare
from fedloom.conf import load
from fedloom.conf.errors import UserError
from fedloom.conf.loading import from_mapping
from fedloom.conf.schema import Config
from fedloom.sims.comparison.entries import Entry
from fedloom.sims.comparison.options import DEFAULT, SECTIONS, usual_loss, values_of
from tests.sims.commands import Command, last_line, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")

Copy = Callable[..., Path]


@pytest.fixture
def copy(run: Path) -> Copy:
    """Copies of the finished run, with another seed each and these keys of the configuration changed."""

    def made(name: str, **changes: Any) -> Path:
        place = Path(shutil.copytree(run, run.with_name(name)))
        tree = yaml.safe_load((place / "config.yaml").read_text()) | {"seed": len(list(run.parent.iterdir()))}
        for key, value in changes.items():
            section, _, option = key.partition("__")
            tree = tree | {section: tree[section] | {option: value} if option else value}
        (place / "config.yaml").write_text(yaml.safe_dump(tree))
        return place

    return made


def rows(*folders: Path, by: list[str] | None = None) -> dict[str, int]:
    """The rows of a comparison: runs by label."""
    return {group.label: len(group.entries) for group in compare(folders, by=by or []).groups}


def at(section: str, value: Any) -> Config:
    """The configuration `digits` with a named section."""
    config, (first, _, rest) = load("digits"), section.partition(".")
    return dataclasses.replace(
        config, **{first: dataclasses.replace(getattr(config, first), **{rest: value}) if rest else value}
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_every_shipped_option_has_a_value_that_json_can_write(section: str):
    registry = SECTIONS[section]
    for name in filter(registry.shipped, registry.names()):
        entry = Entry(Path("x"), at(section, {"name": name}), {}, [], baseline=False)
        fields = {f"{section}.{field.name}" for field in dataclasses.fields(registry.get(name)) if field.name != "mode"}
        inside = {key.removesuffix(".name") for key in entry.everything}
        assert all(field in inside or any(key.startswith(f"{field}.") for key in inside) for field in fields)
        assert json.loads(json.dumps(entry.everything)) == entry.everything
    odd = Entry(Path("x"), at(section, {"name": ["a"]}), {}, [], baseline=False)
    if not section.startswith("training."):
        assert odd.value(f"{section}.width") == "default"


@pytest.mark.parametrize(
    ("section", "one", "others"),
    [
        ("training.optimizer", "sgd", [{"name": "sgd"}, {"name": "SGD", "dampening": 0, "nesterov": "false"}]),
        ("training.optimizer", "Adam", [{"name": "adam"}, {"name": "adam", "betas": ["0.9", 0.999]}]),
        ("training.schedule", "step", [{"name": "step", "every": "10"}, {"name": "step", "every": 10.0, "warm_up": 0}]),
        ("training.loss", "", ["cross_entropy", {"name": "cross_entropy"}, {"name": "cross_entropy", "class_weights": []}]),
        ("training.loss", {"name": "focal", "gamma": 2}, [{"name": "focal", "gamma": "2"}, {"name": "focal", "gamma": 2.0}]),
        ("objective", {"name": "fedprox", "mu": 1}, [{"name": "fedprox", "mu": 1.0}, {"name": "fedprox", "mu": "1"}]),
        ("strategy", {"name": "fedadam", "rate": "0.5"}, [{"name": "fedadam", "rate": 0.5}]),
        ("network", {"name": "conv6", "width": "1"}, [{"name": "conv6", "width": 1.0}, {"name": "conv6", "freeze": []}]),
        ("network", {"name": "split"}, [{"name": "split", "of": {"name": "conv6"}}, {"name": "split", "of": "conv6"}]),
        ("objective", {"name": "layer_selection"}, [{"name": "layer_selection", "learner": "hps"}]),
        ("strategy", {"name": "feddf"}, [{"name": "feddf", "public": {}}]),
        ("network", {"name": "m:Net", "a": 1}, [{"name": "m:Net", "a": 1.0}]),
    ],
)  # fmt: skip
def test_one_value_has_one_spelling(section: str, one: Any, others: list[Any]):
    values = values_of(at(section, one), ["accuracy"])
    for other in others:
        assert json.dumps(values_of(at(section, other), ["accuracy"])) == json.dumps(values)


def test_sites_are_equal_whatever_their_defaults():
    tree = yaml.safe_load((Path(load.__globals__["__file__"]).parent / "digits.yaml").read_text())
    tree = {key: value for key, value in tree.items() if key not in ("presets", "preset")}
    plain, spelt = (
        values_of(from_mapping(tree | {"sites": [{"domain": "digits", **more}]}))["sites"]
        for more in (
            {"samples": 40, "network": {"name": "conv6"}},
            {"samples": "40", "rotation": 0, "network": {"name": "conv6", "width": "1"}, "partition": {"name": "iid"}},
        )
    )
    assert plain == spelt == [{"domain": "digits", "samples": 40, "network": {"name": "conv6"}}]
    (other,) = values_of(from_mapping(tree | {"sites": [{"domain": "digits", "partition": {"name": "size"}}]}))["sites"]
    assert other == {"domain": "digits", "partition": {"name": "size"}}


@pytest.mark.parametrize(
    ("metrics", "configured", "loss"),
    [(["accuracy"], [], "cross_entropy"), (["f1", "auroc"], [], "binary_cross_entropy"), (["rmse"], [], "mse"),
     (["f1", "accuracy"], ["f1", "accuracy"], "cross_entropy"), (["f1"], ["f1"], DEFAULT), (["mae"], ["mae"], "mse"),
     (["Mine"], ["m:Mine"], DEFAULT), ([], [], DEFAULT)],
)  # fmt: skip
def test_the_usual_loss_follows_from_the_metrics(metrics: list[str], configured: list[str], loss: str):
    config = load("digits")
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, metrics=configured))
    assert usual_loss(config, metrics) == loss


def test_runs_with_equal_options_are_one_row(run: Path, copy: Copy):
    copy("a", training__optimizer={"name": "sgd"}, training__loss="cross_entropy", tracking=["csv"])
    copy("b", training__optimizer="SGD", training__schedule={"name": "cosine"}, training__rate="0.03", training__epochs=1)
    assert rows(run.parent) == {"sum_aggregation/exact": 3}


def test_numbers_in_names_are_those_of_the_type(run: Path, copy: Copy):
    method = {"strategy": "fedavg"}
    mus = [0.1, 1, 1.0, "1"]
    folders = [copy(f"r{n}", **method, objective={"name": "fedprox", "mu": mu}) for n, mu in enumerate(mus)]
    assert rows(*folders) == {"mu=0.1": 1, "mu=1.0": 3}
    folders.append(copy("usual", **method, objective="fedprox"))
    assert set(compare(folders).runs()["objective.mu"]) == {0.1, 1.0, SECTIONS["objective"].get("fedprox")().mu}


def test_a_method_without_the_option_is_named(run: Path, copy: Copy):
    fedavg = copy("fedavg", strategy="fedavg", objective="fedavg")
    prox = [copy(f"p{mu}", strategy="fedprox", objective={"name": "fedprox", "mu": mu}) for mu in (0.1, 1)]
    assert rows(fedavg, *prox) == {"strategy=fedavg": 1, "strategy=fedprox, mu=0.1": 1, "strategy=fedprox, mu=1.0": 1}
    nova = copy("nova", strategy="fednova", objective="fednova")
    assert rows(fedavg, nova, *prox, by=["objective.mu"]) == {
        "objective=fedavg": 1, "objective=fednova": 1, "mu=0.1": 1, "mu=1.0": 1}  # fmt: skip
    found = compare([fedavg, *prox])
    assert set(found.runs()["objective.mu"].dropna()) == {0.1, 1.0} and "default" not in found.text()
    assert found.as_json()["rows"][0]["values"] == {"strategy.name": "fedavg", "objective.mu": None}


def test_networks_without_the_option_are_named(run: Path, copy: Copy):
    mlp = copy("mlp", network={"name": "mlp"})
    sized = [copy(f"n{width}", network={"name": "conv6", "width": width}) for width in (0.25, 1)]
    assert rows(mlp, *sized) == {"network=mlp": 1, "network=conv6, width=0.25": 1, "network=conv6, width=1.0": 1}
    adam = copy("adam", training__optimizer="adam")
    sgd = [copy(f"s{rate}", training__optimizer={"name": "sgd", "dampening": rate}) for rate in (0, 0.5)]
    assert rows(adam, *sgd) == {"optimizer=adam": 1, "optimizer=sgd, dampening=0.0": 1, "optimizer=sgd, dampening=0.5": 1}


def test_by_takes_options_at_their_default_and_sections_with_a_name(fedloom: Command, run: Path, copy: Copy, tmp_path: Path):
    prox = [copy("a", objective={"name": "fedprox"}, strategy="fedavg"),
            copy("b", objective={"name": "fedprox", "mu": 5}, strategy="fedavg")]  # fmt: skip
    table = tmp_path / "runs.csv"
    found = last_line(
        fedloom("compare", *prox, "--by", "objective.mu", "--by", "training.schedule", "--json", "--csv", table)
    )
    assert [row["row"] for row in found["rows"]] == ["mu=0.01, schedule=cosine", "mu=5.0, schedule=cosine"]
    assert [run["objective.mu"] for run in found["runs"]] == [0.01, 5.0]
    with table.open(newline="") as file:
        assert [(row["objective.mu"], row["training.schedule.name"]) for row in csv.DictReader(file)] == [
            ("0.01", "cosine"), ("5.0", "cosine")]  # fmt: skip
    for key in ("strategy", "objective", "network", "training.loss", "training.optimizer", "engine"):
        short, full = (rows(run, *prox, by=[each]) for each in (key, f"{key}.name"))
        assert short == full and all(f"{key.rpartition('.')[2]}=" in label for label in short)
    refused(fedloom("compare", *prox, "--by", "mu"), "--by: unknown key 'mu'; did you mean 'objective.mu'?")
    refused(fedloom("compare", *prox, "--by", "lr"), "did you mean 'training.rate'?")


def test_own_classes_are_not_imported(run: Path, copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    own = {"name": "trap:Mine"}
    plain = copy("plain", strategy=own, objective=own, network=own, training__optimizer=own, training__loss=own)
    sized = copy(
        "sized", strategy={**own, "size": 1}, objective=own, network=own, training__optimizer=own, training__loss=own
    )
    again = copy(
        "again", strategy={**own, "size": 1.0}, objective=own, network=own, training__optimizer=own, training__loss=own
    )
    assert rows(plain, sized, again) == {"size=default": 1, "size=1": 2}
    assert rows(run, plain, sized) == {
        "strategy=sum_aggregation": 1, "strategy=trap:Mine, size=default": 1, "strategy=trap:Mine, size=1": 1}  # fmt: skip
    assert rows(run, plain) == {"strategy=sum_aggregation": 1, "strategy=trap:Mine": 1}
    assert set(compare([plain, sized]).runs()["strategy.size"]) == {"default", 1}
    assert "trap" not in sys.modules


def test_long_values_have_labels_that_differ(run: Path, copy: Copy):
    sites = [[{"domain": "digits", "count": 3, "samples": 40, "name": f"a-hospital-with-a-long-name-{n}"}] for n in (1, 2)]
    first, second = rows(*(copy(f"s{n}", sites=each) for n, each in enumerate(sites)))
    assert first.endswith(" #1") and second.endswith(" #2")


def test_a_section_of_a_wrong_type_leaves_out_its_run_alone(run: Path, copy: Copy):
    odd = copy("odd", training__optimizer=5)
    found = compare([run, odd])
    assert len(found.groups) == 1 and found.notes == (f"{odd / 'config.yaml'}: training.optimizer: got 5, takes a name or a "
                                                      "section such as {name: adamw}; left out",)  # fmt: skip
    with pytest.raises(UserError, match="no finished run"):
        compare(odd)
