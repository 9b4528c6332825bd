"""FedBuff: who arrives with which age, the step of the server, and what forgetting a site repeats."""

import math
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from fedloom.clients.objectives import resolve
from fedloom.clients.protocol.messages import MEAN, read_order, to_states
from fedloom.clients.storage.states import read_state
from fedloom.conf import Config, UserError
from fedloom.fusion.state import State
from fedloom.server.ledger.audit import check
from fedloom.server.run.checks import check as refuse
from fedloom.server.strategies import strategy_of
from fedloom.server.strategies.fedbuff import Arrivals
from fedloom.server.unlearning.requests import receive
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from tests.server import kills
from tests.server.parts import Recorder, WatchedApp, folder, small
from tests.server.resumes import metrics, results, resumed, run, stopped

BUFFERED = ["strategy={name: fedbuff, spread: 1.5}", "objective.name=fedavg", "evaluation.every=3"]


def configured(root: Path, *words: str, rounds: int = 6) -> Config:
    return small(root, f"rounds={rounds}", *BUFFERED, *words, sites=5, samples=20)


def arrivals(config: Config) -> Arrivals:
    experiment = resolve(config)
    schedule = strategy_of(experiment).schedule(experiment)
    assert isinstance(schedule, Arrivals)
    return schedule


class Noting(WatchedApp):
    """Notes what each site received and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[tuple[int, int], State] = {}
        self.back: dict[tuple[int, int], State] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        reply = super().__call__(message, context)
        if message.metadata.message_type == "train":
            order = read_order(message.content)
            self.sent[order.round, order.site] = to_states(RecordDict({MEAN: message.content.array_records[MEAN]}))[MEAN]
            self.back[order.round, order.site] = to_states(reply.content)["site"]
        return reply


def test_a_fleet_in_simulated_time():
    sites = small(Path(), sites=40, samples=10).roster
    schedule = Arrivals(seed=3, buffer=8, spread=1.0)
    began = dict.fromkeys((site.name for site in sites), 0)
    counts = dict.fromkeys(began, 0)
    for number in range(1, 101):
        found = schedule.arrivals(number, sites)
        assert len(found) == 8 and all(began[name] == version for name, version in found.items())
        assert [site.name for site in schedule.participation(number, sites).sites] == [
            site.name for site in sites if site.name in found]  # fmt: skip
        began |= dict.fromkeys(found, number)
        counts = {name: times + (name in found) for name, times in counts.items()}
    assert max(counts.values()) > 4 * min(counts.values()), "some sites are much faster"
    equal = Arrivals(seed=3, buffer=8, spread=0.0)
    assert [len(set(equal.arrivals(number, sites)) & set(equal.arrivals(number + 1, sites))) for number in (1, 2, 3)] == [
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("words", [[], ["strategy.rate=0.5", "strategy.most_stale=1"], ["strategy.weighting=samples"]])
def test_the_step_is_the_mean_of_changes_by_age(tmp_path: Path, words: list[str]):
    client = Noting()
    run(config := configured(tmp_path, *words), client=client)
    most, rate = (1, 0.5) if words[:1] == ["strategy.rate=0.5"] else (10, 1.0)
    networks, ages = [client.sent[min(client.sent)]], []
    for number in range(1, 7):
        found = arrivals(config).arrivals(number, config.roster)
        assert {site for round, site in client.sent if round == number} == {int(name[-4:]) for name in found}
        steps = []
        for name, version in found.items():
            begin, key = max(version, number - 1 - most), (number, int(name[-4:]))
            ages.append(number - 1 - begin)
            for tensor, expected in zip(client.sent[key].values(), networks[begin].values(), strict=True):
                assert torch.allclose(tensor, expected, atol=1e-6)
            steps.append({each: (tensor - client.sent[key][each]) / math.sqrt(1 + ages[-1])
                          for each, tensor in client.back[key].items()})  # fmt: skip
        networks.append({each: tensor + rate * sum(step[each] for step in steps) / len(steps)
                         for each, tensor in networks[-1].items()})  # fmt: skip
    aggregate = read_state(folder(config) / "states/aggregate.safetensors")
    assert all(torch.allclose(tensor, networks[-1][name], atol=1e-5) for name, tensor in aggregate.items())
    assert max(ages) == (1 if most == 1 else max(ages)) and max(ages) >= 1
    assert [line["replies"] for line in metrics(folder(config))] == [3] * 6 and check(folder(config)) == []


@pytest.mark.parametrize("after", [1, 4])
def test_a_run_that_was_stopped_has_the_same_ages(tmp_path: Path, after: int):
    words = ["federation.dropout=0.3"]
    run(whole := configured(tmp_path / "whole", *words))
    resumed(halves := stopped(configured(tmp_path / "halves", *words), after))
    assert results(folder(halves)) == results(folder(whole))


def test_a_run_that_was_killed_has_the_same_ages(tmp_path: Path):
    whole, killed = (kills.configured(tmp_path / name, *BUFFERED) for name in ("whole", "killed"))
    run(whole)
    kills.die(killed, ("after commit", 3))
    resumed(killed)
    assert kills.results(folder(killed)) == kills.results(folder(whole))


def test_workers_of_ray_have_the_same_ages(tmp_path: Path):
    found = []
    for name, more in {"inline": ["engine.name=inline"], "ray": ["engine.name=ray", "engine.workers=2"]}.items():
        simulate(config := configured(tmp_path / name, *more))
        found.append(results(folder(config))["states"])
    assert found[0] == found[1]


def test_forgetting_repeats_the_last_step_and_says_what_remains(tmp_path: Path):
    client = Noting()
    run(config := configured(tmp_path), client=client)
    before = read_state(folder(config) / "states/aggregate.safetensors")
    gone = next(iter(arrivals(config).arrivals(6, config.roster)))
    certificate = unlearn(folder(config), UnlearningRequest([gone], "r1")).certificate
    after = read_state(folder(config) / "states/aggregate.safetensors")
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    assert "networks that the server stores for slow sites" in str(certificate) and check(folder(config)) == []
    live, listener = configured(tmp_path / "live"), Recorder()
    from fedloom.server.ledger import Ledger

    def ask(record: dict) -> None:
        if record["round"] == 3:
            with Ledger.open(folder(live), server=False) as ledger:
                receive(ledger, "r1", ["site-0001"], "", {})

    listener.round_done = ask
    assert run(live, listener)["unlearned"] == ["site-0001"]
    assert len(metrics(folder(live))) == 6 and check(folder(live)) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["federation.secure_aggregation=true"], r"federation\.secure_aggregation: strategy fedbuff excludes it"),
        (["federation.partial_sums=true", "engine.name=ray"], r"federation\.partial_sums: strategy fedbuff excludes it"),
        (["privacy.clip=1", "privacy.noise=1"], r"privacy\.noise: strategy fedbuff excludes it"),
        (["federation.fraction=0.5"], r"federation\.fraction: with strategy fedbuff all sites train"),
        (["strategy.buffer=6"], r"strategy\.buffer: got 6, takes at most the number of sites \(5\)"),
        (["federation.min_replies=4"], r"strategy\.buffer: got 0, takes .* federation\.min_replies \(4\)"),
    ],
)
def test_what_it_excludes_is_refused_in_one_line(tmp_path: Path, words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        refuse(configured(tmp_path, *words))
