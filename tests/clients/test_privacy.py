"""Differential privacy at the site: the noise is the discrete Gaussian, the change is clipped, the budget is kept."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.clients.privacy.differential import discrete_gaussian, epsilon
from fedloom.clients.storage.states import read_state
from fedloom.conf import UserError
from fedloom.conf.errors import FailedError
from fedloom.fusion.state import digest
from fedloom.server.rounds.privacy import check_hidden
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.report.report import write_report
from tests.server.masked import configured, held, others, run
from tests.server.parts import Recorder, folder, small
from tests.server.runs import method_of
from tests.sims.pages import checked

NOISE = ("privacy.clip=0.5", "privacy.noise=1.0")


@pytest.mark.parametrize("deviation", [0.3, 1.0, 2.5, 7.3])
def test_the_noise_is_a_discrete_gaussian(deviation: float) -> None:
    """Chi-squared over the values with more than 20 expected draws; fails by chance once in 10**6 runs."""
    count = 200_000
    found = discrete_gaussian(deviation, count)
    reach = int(12 * deviation) + 2
    weights = {k: math.exp(-(k**2) / (2 * deviation**2)) for k in range(-reach, reach + 1)}
    total = sum(weights.values())
    expected = {k: count * one / total for k, one in weights.items()}
    likely = [k for k, number in expected.items() if number > 20]
    squares = sum((float((found == k).sum()) - expected[k]) ** 2 / expected[k] for k in likely)
    freedom = len(likely) - 1
    assert squares < freedom + 5 * math.sqrt(2 * freedom) + 15


@settings(max_examples=20)
@given(st.floats(1.0, 2.0**45), st.integers(0, 5000))
def test_large_noise_has_its_mean_and_deviation(deviation: float, more: int) -> None:
    found = discrete_gaussian(deviation, 20_000 + more).double()
    assert len(found) == 20_000 + more
    assert abs(float(found.mean())) < 7 * deviation / math.sqrt(len(found))
    assert abs(float(found.std()) / deviation - 1) < 0.06


def test_noise_is_never_the_same() -> None:
    assert not torch.equal(discrete_gaussian(1e6, 100), discrete_gaussian(1e6, 100))
    for bad in (0.0, -1.0, 2.0**60, math.nan):
        with pytest.raises(UserError, match=r"privacy\.noise: noise of"):
            discrete_gaussian(bad, 1)


def test_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    """Of one round, by Balle and Wang 2018, Theorem 8: exact; the accountant may tell more, never less."""
    for noise in (0.7, 1.0, 3.0):
        epsilon_once = epsilon({noise: 1}, 1e-5)

        def delta(eps: float, noise: float = noise) -> float:
            def phi(x: float) -> float:
                return 0.5 * math.erfc(-x / math.sqrt(2))

            return phi(0.5 / noise - eps * noise) - math.exp(eps) * phi(-0.5 / noise - eps * noise)

        assert delta(epsilon_once) <= 1e-5 < delta(0.6 * epsilon_once)
    assert epsilon({1.0: 2}, 1e-5) > epsilon({1.0: 1}, 1e-5) > epsilon({2.0: 1}, 1e-5)
    assert epsilon({1.0: 1, 2.0: 1}, 1e-5) > epsilon({1.0: 1}, 1e-5)


@pytest.mark.parametrize("masks", ["false", "true"])
def test_what_is_sent_is_noised_and_reported(tmp_path: Path, masks: str) -> None:
    word = f"federation.secure_aggregation={masks}"
    config, plain = configured(tmp_path, *NOISE, word), configured(tmp_path, word, name="plain")
    recorder = run(config)
    run(plain)
    with method_of(config) as method, method_of(plain) as without:
        assert method.state.digest() != without.state.digest()
        assert all(method.state.checks()[0].values())
        assert method.state.digest()["sum"] == held(config, others())  # the sum of what was sent
        assert [record["epsilon"] for record in recorder.records] == [
            dict.fromkeys(others(), epsilon({1.0: times}, 1e-5)) for times in (1, 2)
        ]
        noted = [event.body["record"] for event in method.ledger.events() if event.kind == "round" and event.body["round"]]
        assert [one["epsilon"] for one in noted] == [record["epsilon"] for record in recorder.records]
    again = configured(tmp_path, *NOISE, word, name="again")
    run(again)
    with method_of(config) as first, method_of(again) as second:
        assert first.state.digest() != second.state.digest()  # not drawn from the run's seed


def test_the_report_tells_what_was_hidden_and_what_it_cost(tmp_path: Path) -> None:
    config = configured(tmp_path, *NOISE, "federation.secure_aggregation=true")
    run(config)
    page = checked(write_report(folder(config)))
    assert "the server read only sums over sites, not single contributions" in page.text
    assert "Noise multiplier 1, changes clipped to 0.5, delta 1e-05" in page.text
    assert f"{epsilon({1.0: 2}, 1e-5):.3g}" in page.text


@pytest.mark.parametrize(("masks", "parts"), [("false", 1.0), ("true", 4.0)])
def test_noise_and_clipping_have_the_size_that_is_accounted_for(tmp_path: Path, masks: str, parts: float) -> None:
    """Of one round from one start: what was sent is as far as the noise; under masks each adds a fourth of its variance."""
    word = f"federation.secure_aggregation={masks}"
    config = configured(tmp_path, "privacy.clip=0.001", "privacy.noise=50.0", word, "rounds=1")
    run(config)
    with method_of(config) as method:
        start = method.state.round_context().initial()
        for site in others():
            sent = read_state(max(store_folder(config).glob(f"*/{site}/summed-*.safetensors")))
            moved = torch.cat([(one.double() * 2.0**-32 - start[name].double()).flatten() for name, one in sent.items()])
            assert abs(float(moved.std()) / (0.05 / math.sqrt(parts)) - 1) < 0.1


def test_a_site_stops_when_its_budget_is_spent(tmp_path: Path) -> None:
    limit = epsilon({1.0: 1}, 1e-5) + 0.1
    config = configured(tmp_path, *NOISE, f"privacy.epsilon={limit}", "rounds=2")
    with pytest.raises(FailedError, match=r"privacy\.epsilon: another round would cost"):
        run(config)
    with method_of(config) as method:
        assert method.unlearning().last_round() == 1
    spent = folder(config) / "sites"
    assert all(json.loads(path.read_text()) == {"1.0": 1} for path in spent.glob("**/privacy/*.json"))


def test_half_a_mechanism_and_methods_that_read_replies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set both"):
        check_hidden(small(tmp_path, "privacy.noise=1.0"))
    config = small(tmp_path, *NOISE, "strategy.name=exclusive", "objective.name=heterogeneous", "baselines=[]")
    with pytest.raises(UserError, match=r"privacy\.noise: strategy 'exclusive' reads every site's reply"):
        run(config)


def test_plain_runs_are_what_they_were(tmp_path: Path) -> None:
    one, two = configured(tmp_path, name="one"), configured(tmp_path, name="two")
    assert isinstance(run(one), Recorder)
    run(two)
    with method_of(one) as first, method_of(two) as second:
        assert digest(first.state.aggregate().state) == digest(second.state.aggregate().state)
        assert not any("epsilon" in (event.body.get("record") or {}) for event in first.ledger.events())
