"""Sites that fail at random (federation.dropout), rounds of a part of an epoch, and a budget of examples for an entry."""

from collections import Counter
from pathlib import Path

import pytest
from flwr.app import RecordDict

from fedloom.clients.data import site_examples, site_sizes
from fedloom.clients.objectives import resolve
from fedloom.clients.protocol.messages import TaskInstructions, read_order
from fedloom.clients.training.learner import step_count
from fedloom.conf import Config, UserError, load
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.schedules import failing
from fedloom.sims.operations.simulate import simulate
from tests.server import kills
from tests.server.parts import Recorder, WatchedApp, folder, small
from tests.server.resumes import metrics, results, resumed, run, stopped

DROPOUT = "federation.dropout=0.5"
METHODS = [
    ["objective.mode=exact"],
    ["objective.name=fedavg", "strategy.name=fedavg"],
    ["objective.name=ditto", "strategy.name=ditto"],
    ["objective.mode=exact", "federation.secure_aggregation=true", "strategy.weighting=equal", "training.batch=5"],
]


def configured(root: Path, *words: str, rounds: int = 4) -> Config:
    return small(root, f"rounds={rounds}", "evaluation.every=2", *words, sites=6, samples=20)


def dropped(config: Config) -> list[dict[str, str]]:
    return [line["dropped"] for line in metrics(folder(config))]


def test_the_seed_draws_who_fails_and_when(tmp_path: Path):
    config = small(tmp_path, "federation.dropout=0.3", sites=50, samples=10)
    rounds = {number: failing(config, number, config.roster) for number in range(1, 41)}
    moments = Counter(moment for fails in rounds.values() for moment in fails.values())
    assert abs(moments.total() / (50 * 40) - 0.3) < 0.04
    assert set(moments) == {"before", "during", "after"} and min(moments.values()) > 0.25 * moments.total()
    assert rounds[1] != rounds[2] and rounds[3] == failing(config, 3, config.roster)
    some = failing(config, 3, config.roster[10:20])
    assert some == {
        name: moment for name, moment in rounds[3].items() if name in {site.name for site in config.roster[10:20]}
    }
    assert failing(small(tmp_path, sites=50, samples=10), 1, config.roster) == {}


@pytest.mark.parametrize(("words", "least"), [([], 1), (["federation.min_replies=4"], 4),
                                              (["federation.secure_aggregation=true"], 5)])  # fmt: skip
def test_as_many_as_a_round_needs_do_not_fail(tmp_path: Path, words: list[str], least: int):
    config = configured(tmp_path, "federation.dropout=1", *words)
    assert [len(failing(config, number, config.roster)) for number in (1, 2)] == [6 - least, 6 - least]


@pytest.mark.parametrize("words", METHODS)
def test_who_fails_does_not_count_and_the_run_continues(tmp_path: Path, words: list[str]):
    listener, client = Recorder(), WatchedApp()
    run(config := configured(tmp_path, DROPOUT, *words), listener, client)
    expected = [failing(config, number, config.roster) for number in range(1, 5)]
    assert sum(map(len, expected)) >= 4
    message = "federation.dropout: the site fails {} its training"
    assert dropped(config) == [{name: message.format(moment) for name, moment in fails.items()} for fails in expected]
    assert [line["replies"] for line in metrics(folder(config))] == [6 - len(fails) for fails in expected]
    assert listener.messages == [] and check(folder(config)) == []
    assert {(order.site, order.round, order.fails) for order in client.orders if order.fails} == {
        (config.roster[int(name[-4:])].index, number, moment)
        for number, fails in enumerate(expected, 1) for name, moment in fails.items()}  # fmt: skip


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_was_stopped_drops_as_one_that_was_not(tmp_path: Path, after: int):
    run(whole := configured(tmp_path / "whole", DROPOUT))
    resumed(halves := stopped(configured(tmp_path / "halves", DROPOUT), after))
    assert results(folder(halves)) == results(folder(whole))


def test_a_run_that_was_killed_drops_as_one_that_was_not(tmp_path: Path):
    whole, killed = (kills.configured(tmp_path / name, DROPOUT, "training.epochs=0.5") for name in ("whole", "killed"))
    run(whole)
    kills.die(killed, ("after commit", 3))
    resumed(killed)
    assert kills.results(folder(killed)) == kills.results(folder(whole))


def test_workers_of_ray_drop_the_same_sites_also_with_partial_sums(tmp_path: Path):
    found = []
    for index, more in enumerate(
        [["engine.name=inline"], ["engine.name=ray", "engine.workers=2", "federation.partial_sums=true"]]
    ):
        config = configured(tmp_path / str(index), DROPOUT, "training.epochs=0.5", *more)
        simulate(config)
        found.append((results(folder(config))["states"], dropped(config)))
    assert found[0] == found[1]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 7), (0.5, 4), (0.01, 1), (2, 14), (1.5, 11)])
def test_a_fraction_of_an_epoch_is_rounded_to_whole_batches(tmp_path: Path, epochs: float, steps: int):
    config = small(tmp_path, f"training.epochs={epochs}", "training.batch=3")
    assert step_count(20, resolve(config)) == steps


def test_half_an_epoch_is_the_first_half_of_one(tmp_path: Path):
    words = ["training.schedule=constant", "objective.name=fedavg", "strategy.name=fedavg", "training.batch=5"]
    run(half := configured(tmp_path / "half", *words, "training.epochs=0.5", rounds=1))
    run(steps := configured(tmp_path / "steps", *words, "training.steps=2", rounds=1))
    assert results(folder(half))["states"] == results(folder(steps))["states"]


def test_a_budget_is_divided_among_the_sites_of_an_entry(tmp_path: Path):
    words = [
        "sites=[{domain: digits, total: 100, count: 4, partition: {name: dirichlet, min_samples: 3}}, {domain: digits}]"
    ]
    config = load("digits", [*words, "data.size=8", f"run.root={tmp_path}"])
    *shared, other = site_sizes(config)
    assert sum(shared) == 100 and len(set(shared)) > 1 and other > 1000
    assert [len(site_examples(config, site)) for site in config.roster[:4]] == shared
    alone = load("digits", ["sites=[{domain: digits, total: 100, samples: 30}]", "data.size=8"])
    assert site_sizes(alone) == [30]


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match=r"site-0000 \(digits\): total=99999, but there are \d+ training examples"):
        site_sizes(load("digits", ["sites=[{domain: digits, total: 99999}]"]))
    for word, message in {"federation.dropout=1.5": "from 0", "training.epochs=0": "of at least 0.001"}.items():
        with pytest.raises(UserError, match=message):
            load("digits", [word])
    order = TaskInstructions(config="0" * 64, run="r", site=0, round=1, rounds=1, base=0, members=1, fails="never")
    with pytest.raises(UserError, match=r"order\.fails: takes one of before, during, after"):
        read_order(RecordDict({"order": order.record()}))
