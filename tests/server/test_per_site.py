"""Accuracy at single sites: the same numbers from the server and from the sites, which add up; who is looked at."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.clients.evaluation.accuracy import Score
from fedloom.conf import Config, load
from fedloom.server.rounds.schedules import looked_at
from fedloom.server.run.final_evaluation import common_names, counted, spread
from fedloom.sims.operations.simulate import simulate
from tests.server.parts import small

DIRICHLET = "sites=[{domain: digits, count: 6, partition: {name: dirichlet, alpha: 0.3}}]"


def configured(root: Path, *words: str) -> Config:
    fixed = [DIRICHLET, "data.size=8", "data.validation_limit=50", "rounds=1", "network.width=0.25", "engine.name=inline"]
    return load("digits", [*fixed, f"run.root={root}", *words])


def summary(root: Path, *words: str) -> dict[str, Any]:
    config = configured(root, *words)
    simulate(config)
    return json.loads((root / config.run.name / "summary.json").read_text())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("runs")
    return [summary(root, f"evaluation.where={where}", f"run.name={where}") for where in ("server", "sites")]


def test_server_and_sites_find_the_same(both: list[dict[str, Any]]):
    server, sites = both
    assert set(server["per_site"]) == {"aggregate", "own"}
    assert server["per_site"] == sites["per_site"]
    assert server["classes"] == sites["classes"]
    assert "class_names" not in server  # digits are numbers


def test_what_is_found_at_the_sites_adds_up(both: list[dict[str, Any]]):
    server = both[0]
    for found in server["per_site"].values():
        for one in found["sites"].values():
            assert [sum(column) for column in zip(*one["classes"].values(), strict=True)] == [one["right"], one["images"]]
            assert one["accuracy"] == one["right"] / one["images"]
        columns = zip(*found["classes"].values(), strict=True)
        assert [sum(column) for column in columns] == [sum(one[key] for one in found["sites"].values())
                                                       for key in ("right", "images")]  # fmt: skip
    whole = server["per_site"]["aggregate"]["classes"].values()
    assert sum(right for right, _ in whole) / sum(total for _, total in whole) == server["accuracy"]["sum"]["union"]


def test_the_spread_is_over_sites_each_of_which_counts_the_same():
    scores = {f"site-{place:04d}": Score(place, 10, {0: (place, 10)}) for place in range(11)}
    found = spread(scores)
    assert found["mean"] == pytest.approx(0.5)
    assert found["deviation"] == pytest.approx(10**0.5 / 10)
    assert found["deciles"] == pytest.approx([place / 10 for place in range(1, 10)])
    assert (found["worst"], found["best"]) == (
        {"site": "site-0000", "accuracy": 0.0},
        {"site": "site-0010", "accuracy": 1.0},
    )
    assert found["classes"] == {"0": [55, 110]}


def test_classes_have_the_names_that_all_agree_on():
    shared, apart = load("digits"), load("digits", ["data.heads=task"])
    one, other = ("cat", "dog\x1b[31m", "owl"), ("cat", "elk")
    assert common_names(shared, [one, other]) == {"0": "cat", "2": "owl"}
    assert common_names(shared, [one, ()]) == {"0": "cat", "1": "dog", "2": "owl"}
    assert common_names(apart, [one, ()]) == common_names(shared, [()]) == common_names(shared, []) == {}
    assert common_names(apart, [one, one]) == {"0": "cat", "1": "dog", "2": "owl"}


def test_those_that_are_looked_at_are_a_sample_of_those_that_trained(tmp_path: Path):
    words = ["federation.fraction=0.5", "evaluation.sites=2", "rounds=1"]
    found = summary(tmp_path, *words, "run.name=few", "baselines=[fedavg]")
    trained = {site for site, both in json.loads((tmp_path / "few/metrics.jsonl").read_text())["bytes"].items() if any(both)}
    assert len(trained) == 3
    assert set(found["per_site"]) == {"aggregate", "own", "fedavg"}
    there = set(found["per_site"]["own"]["sites"])
    assert len(there) == 2 and there < trained
    assert set(found["forgotten"]) == there == set(found["per_site"]["fedavg"]["sites"])


def test_the_sample_is_drawn_by_the_seed_and_may_be_all_or_none(tmp_path: Path):
    names = [f"site-{place:04d}" for place in range(200)]
    draws = [looked_at(small(tmp_path, "evaluation.sites=50", f"seed={seed}"), names) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert all(len(draw) == 50 and draw == sorted(set(draw)) for draw in draws)
    assert draws[0] != names[:50]
    assert looked_at(small(tmp_path, "evaluation.sites=-1"), names) == names
    assert looked_at(small(tmp_path, "evaluation.sites=0"), names) == []


def test_of_very_many_sites_an_even_share_is_counted(tmp_path: Path):
    config = load("digits", ["sites=[{domain: digits, count: 1200, partition: {min_samples: 1}}]", f"run.root={tmp_path}"])
    found = counted(config, config.roster)
    assert list(found) == [site.name for site in config.roster[::2]]
