"""FedNova: what its network is, whoever answers; that bounds, noise and masks leave it one; that no site says its work."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fedloom.clients.protocol.messages import METRICS, SITE
from fedloom.fusion.state import State
from fedloom.server.strategies.averaging import NETWORKS
from fedloom.sims.benchmarks.soak_replies import changed, edited, raising
from tests.server.averages import configured, network_of, played, same
from tests.server.parts import Run, WatchedApp, set_up

UNEVEN = "count: 3, partition: {name: size, growth: 2.0}"
ONE_ROUND = ("rounds=1", "training.epochs=2")


def expected(plain: Run, places: Sequence[int]) -> State:
    """x + tau_eff * sum p_i (y_i - x) / tau_i over these sites, from what FedAvg's send after one round."""
    view, sites = plain.aggregate.view(), [plain.aggregate.setup.sites[place] for place in places]
    samples = [view.last_samples(site.name) for site in sites]
    shares = [number / sum(samples) for number in samples]
    works = [2 * 0.1 * -(-number // 16) for number in samples]
    assert len(set(works)) == len(works)
    start, work = view.initial(), sum(share * work for share, work in zip(shares, works, strict=True))
    found = {}
    for name, begin in start.items():
        changes = [view.contribution(NETWORKS, site.name)[name] - begin for site in sites]
        parts = [share * change / one for share, change, one in zip(shares, changes, works, strict=True)]
        found[name] = begin + work * torch.stack(parts).sum(0)
    return found


def assert_near(found: State, other: State) -> None:
    for name, tensor in other.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("words", [[], ["training.momentum=0.9", "training.schedule=cosine"]])
def test_it_is_fedavg_where_sites_take_as_many_steps(tmp_path: Path, words: list[str]):
    nova = played(tmp_path / "nova", "strategy.name=fednova", *words)
    assert same(nova, played(tmp_path / "plain", "strategy.name=fedavg", *words))


def test_each_sites_change_is_weighed_by_its_work_whoever_counts(tmp_path: Path):
    """Of uneven sites: all of them, without one that did not answer, and without one that was forgotten."""
    plain = played(tmp_path / "plain", "strategy.name=fedavg", *ONE_ROUND, sites=UNEVEN)
    nova = played(tmp_path / "nova", "strategy.name=fednova", *ONE_ROUND, sites=UNEVEN)
    assert_near(network_of(nova), expected(plain, [0, 1, 2]))
    nova.aggregate.membership.forget(["site-0002"], {})
    assert_near(network_of(nova), expected(plain, [0, 1]))
    config = configured(tmp_path / "silent", "strategy.name=fednova", *ONE_ROUND, sites=UNEVEN)
    silent = set_up(config, WatchedApp(raising("off"), place=1, rounds=(1,))).all_rounds()
    assert_near(network_of(silent), expected(plain, [0, 2]))


# Sites whose steps make 15 of a gradient
HARD = ("training.momentum=0.9", "training.steps=20", "strategy.weighting=equal", "rounds=3")


@pytest.mark.parametrize(
    "words",
    [
        ["federation.clip_change=0.5"],
        ["privacy={clip: 0.5, noise: 1e-6}"],
        ["federation={secure_aggregation: true, fraction: 0.67, secure_threshold: 1.0}"],
    ],
    ids=["clipped", "noised", "masked"],
)
def test_bounds_noise_and_masks_do_to_it_what_they_do_to_fedavg(tmp_path: Path, words: list[str]):
    """Sites that take as many steps: once the work was clipped and noised with the network, and multiplied old networks."""
    nova = played(tmp_path / "nova", "strategy.name=fednova", *HARD, *words, sites="count: 4, samples: 40")
    plain = played(tmp_path / "plain", "strategy.name=fedavg", *HARD, *words, sites="count: 4, samples: 40")
    for name, tensor in network_of(plain).items():
        torch.testing.assert_close(network_of(nova)[name], tensor, atol=1e-3, rtol=0)


def test_a_site_that_says_its_work_is_dropped(tmp_path: Path):
    lie = changed(SITE, lambda state: {**state, "fednova/work": torch.tensor(900.0)})
    config = configured(tmp_path, "strategy.name=fednova")
    run = set_up(config, WatchedApp(lie, place=1, rounds=(1,))).all_rounds()
    assert run.listener.records[0]["dropped"] == {"site-0001": "record 'site' has an unknown tensor 'fednova/work'"}


def test_a_site_that_claims_few_images_counts_for_little(tmp_path: Path):
    """The most that it can do is to be left out."""
    few = edited(lambda content: content.metric_records[METRICS].__setitem__("samples", 1))
    plain = played(tmp_path / "plain", "strategy.name=fedavg", *ONE_ROUND, sites=UNEVEN)
    config = configured(tmp_path / "nova", "strategy.name=fednova", *ONE_ROUND, sites=UNEVEN)
    run = set_up(config, WatchedApp(few, place=1, rounds=(1,))).all_rounds()
    without = expected(plain, [0, 2])
    far = max(float((network_of(run)[name] - one).abs().max()) for name, one in without.items())
    start = plain.aggregate.view().initial()
    assert far < 0.1 * max(float((without[name] - one).abs().max()) for name, one in start.items())


@pytest.mark.parametrize("name", ["fednova", "scaffold"])
def test_a_round_without_a_rate_changes_nothing(tmp_path: Path, name: str):
    """Warm-up from 0, in whose first round each site takes one step: there is no work to divide by."""
    run = played(tmp_path, f"strategy.name={name}", "training.batch=4096", "training.rate=0.1", "rounds=1",
                 "training.schedule={name: constant, warm_up: 2, start_factor: 0}")  # fmt: skip
    start = run.aggregate.view().initial()
    assert run.listener.records[0]["replies"] == 3
    for name, tensor in network_of(run).items():
        torch.testing.assert_close(tensor, start[name])
