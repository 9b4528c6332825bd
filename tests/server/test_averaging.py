"""The standard averaging methods: what they reduce to, and that forgetting makes the last step of the server again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedloom.clients.data import site_examples
from fedloom.clients.networks import Network, architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import Task, resolve
from fedloom.clients.objectives.ditto import personal
from fedloom.clients.objectives.local import LocalSession
from fedloom.clients.objectives.scaffold import CONTROL
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.clients.storage.store import SiteStore
from fedloom.clients.training.learner import batches, learn
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import State, digest
from fedloom.server.rounds.context import RoundContext
from fedloom.server.run.training_run import one_round
from fedloom.server.strategies.averaging import NETWORK, NETWORKS
from fedloom.server.strategies.base import strategy_of
from fedloom.server.strategies.server_optimisers import FedAvgM
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.experiments.plain_fedavg import plain_fedavg
from tests.server.averages import configured, network_of, played, same
from tests.server.parts import Run, set_up

METHODS = ["fedavg", "fedprox", "scaffold", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fednova", "ditto"]


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return played(tmp_path_factory.mktemp("fedavg"), "strategy.name=fedavg")


REDUCED = {
    "fedprox": ["objective.mu=0"],
    "fedavgm": ["strategy.momentum=0", "strategy.rate=1"],
    "ditto": ["objective.strength=0.3"],
}


@pytest.mark.parametrize("name", REDUCED)
def test_with_nothing_of_its_own_a_method_is_fedavg_bit_for_bit(tmp_path: Path, fedavg: Run, name: str):
    assert same(played(tmp_path, f"strategy.name={name}", *REDUCED[name]), fedavg)


@dataclass(frozen=True)
class InPlace(FedAvgM):
    """The same rule, worked out in the very tensors that it is handed."""

    def step(self, last: Mapping[str, State], mean: State, parameters: frozenset[str]) -> dict[str, State]:
        moved = super().step(last, mean, parameters)
        for name, state in moved.items():
            for key, tensor in state.items():
                last[name][key].copy_(tensor)
        mean.clear()
        return dict(last)


def test_a_method_may_work_in_place_on_what_it_is_handed(tmp_path: Path):
    words = ["strategy.momentum=0.5", "rounds=3", "objective.name=fedavg", "evaluation.every=1"]
    plain = played(tmp_path / "plain", "strategy.name=fedavgm", *words)
    assert same(played(tmp_path / "in place", f"strategy.name={__name__}:InPlace", *words), plain)


@dataclass(frozen=True)
class OnlyTheFirst(FedAvgM):
    """Of the participants, the first one trains."""

    def trainees(self, context: RoundContext) -> Sequence[Site]:
        return context.participants[:1]


def test_a_method_may_choose_who_trains(tmp_path: Path):
    run = played(tmp_path, f"strategy.name={__name__}:OnlyTheFirst", "objective.name=fedavg", "rounds=2")
    view = run.aggregate.view()
    assert [view.last_put(site.name) for site in view.sites if view.has(NETWORKS, site.name)] == [2]


def test_with_its_own_a_method_is_not_fedavg(tmp_path: Path, fedavg: Run):
    for name in METHODS[1:-1]:
        words = ["objective.mu=1"] if name == "fedprox" else []
        uneven = "count: 3, partition: {name: size}" if name == "fednova" else "count: 3, samples: 60"
        assert not same(played(tmp_path / name, f"strategy.name={name}", *words, sites=uneven), fedavg)


def test_scaffolds_variates_average_to_the_servers_and_are_mean_gradients(tmp_path: Path):
    run = played(tmp_path, "strategy.name=scaffold", "federation.fraction=0.67", "rounds=1")
    view, strategy = run.aggregate.view(), run.aggregate.strategy
    control = strategy.control(view)  # type: ignore[attr-defined]
    trained = [site.name for site in run.aggregate.members() if view.has(NETWORKS, site.name)]
    assert len(trained) == 2
    start = view.initial()
    for name, tensor in control.items():
        own = [view.contribution(NETWORKS, site)[name] for site in trained]
        torch.testing.assert_close(tensor, sum(own) / 3)  # the third one's is zero
        sent = view.contribution(NETWORKS, trained[0])[name.removeprefix(CONTROL)]
        mean_gradient = (start[name.removeprefix(CONTROL)] - sent) / (4 * 0.1)  # 60 images, batches of 16
        torch.testing.assert_close(own[0], mean_gradient, atol=1e-5, rtol=1e-4)


def test_scaffold_is_fedavg_in_its_first_round_and_where_sites_are_one(tmp_path: Path):
    """Before any variate is known nothing is corrected; with one site c and c_i are the same."""
    for sites, rounds in (("count: 3, samples: 60", 1), ("count: 1, samples: 60", 3)):
        words = [f"rounds={rounds}", "strategy.weighting=equal"]
        corrected = network_of(played(tmp_path / f"s{rounds}", "strategy.name=scaffold", *words, sites=sites))
        plain = network_of(played(tmp_path / f"f{rounds}", "strategy.name=fedavg", *words, sites=sites))
        for name, tensor in plain.items():
            torch.testing.assert_close(corrected[name], tensor, atol=1e-6, rtol=1e-5)


def personal_of(run: Run, site: int) -> State:
    """A site's own network, from its own store."""
    return personal(SiteStore(store_folder(run.config), "run", run.config.roster[site].name).load(2))


def trained_alone(config: Config, place: int) -> State:
    """The network that a site makes of theta_0 in two rounds on its own."""
    site, state = config.roster[place], initial_state(config)
    images = site_examples(config, site)
    for number in (1, 2):
        network = architecture_of(config).build()
        task = Task(resolve(config), site, number, 3, network, {MEAN: state}, lambda: None, torch.Generator())
        learn(session := LocalSession(task), images, resolve(config), site, number, torch.device("cpu"))
        state = session.contribution()[SITE]
    return state


def test_dittos_own_networks_are_local_training_without_the_pull_and_near_the_shared_one_with_it(tmp_path: Path):
    free = played(tmp_path / "free", "strategy.name=ditto", "objective.strength=0")
    held = played(tmp_path / "held", "strategy.name=ditto", "objective.strength=5")
    alone, shared = trained_alone(free.config, 1), network_of(free)
    assert digest(personal_of(free, 1)) == digest(alone)
    assert digest(shared) == digest(network_of(held))
    far, near = (sum(float((personal_of(run, 1)[name] - one).square().sum()) for name, one in shared.items())
                 for run in (free, held))  # fmt: skip
    assert near < far / 2
    own, shared = (free.loop.tables([model], "test")[0][0]["accuracy"] for model in (None, free.aggregate.aggregate()))
    assert own["union"] != shared["union"]


@pytest.mark.parametrize("name", METHODS)
def test_a_forgotten_sites_last_round_is_made_again_without_it(tmp_path: Path, name: str):
    """After one round what is left is, bit for bit, what a run without the site has after it."""
    three = played(tmp_path / "three", f"strategy.name={name}", "rounds=1")
    before = network_of(three)
    preview = three.aggregate.without(["site-0002"])
    three.aggregate.membership.forget(["site-0002"], {})
    left = network_of(three)
    assert preview is not None and digest(preview.state) == digest(left)
    assert digest(left) != digest(before)
    view = three.aggregate.view()
    two = [view.contribution(NETWORKS, site.name) for site in three.aggregate.members()]
    if name in ("fedavg", "fedprox", "ditto"):
        for key, tensor in left.items():
            torch.testing.assert_close(tensor, (two[0][key] + two[1][key]) / 2, atol=1e-7, rtol=1e-6)
    assert three.aggregate.residue(["site-0002"]) == []


def test_a_site_that_never_took_part_or_just_began_has_left_nothing(tmp_path: Path):
    run = played(tmp_path, "strategy.name=fedavg", "federation.fraction=0.25", "rounds=4", sites="count: 8, samples: 40")
    view = run.aggregate.view()
    first = {site.name: min((one.round for one in view.ledger.history(site.name)), default=0) for site in view.sites}
    never, late, early = (next(name for name, round in first.items() if round == wanted) for wanted in (0, 4, 1))
    before = run.aggregate.digest()
    run.aggregate.membership.forget([never], {})
    assert run.aggregate.digest() == before
    run.aggregate.membership.forget([late], {})
    run.aggregate.membership.forget([early], {})
    residue = [bool(run.aggregate.residue([name])) for name in (never, late, early)]
    assert residue == [False, False, True] and run.aggregate.residue([never, early])


def test_later_rounds_leave_traces_that_are_reported(tmp_path: Path):
    run = played(tmp_path, "strategy.name=fedadam")
    residue = run.aggregate.residue()
    assert residue[0].location == "the other sites' networks"
    assert "momentum and squares" in residue[1].location


@pytest.mark.parametrize("name", METHODS)
def test_batchnorm_is_averaged_and_counts_stay(tmp_path: Path, name: str):
    run = played(tmp_path, f"strategy.name={name}", network="norms")
    state, start = network_of(run), run.aggregate.view().initial()
    count, mean = next(n for n in state if n.endswith("num_batches_tracked")), next(n for n in state if "running_mean" in n)
    assert torch.equal(state[count], start[count])
    assert state[count].dtype == torch.int64
    assert not torch.equal(state[mean], start[mean])
    view = run.aggregate.view()
    sites = [view.contribution(NETWORKS, site.name) for site in run.aggregate.members()]
    torch.testing.assert_close(state[mean], sum(one[mean] for one in sites) / 3)
    assert count not in sites[0]


@pytest.mark.parametrize(("sites", "network", "words", "message"), [
    ("count: 3, partition: {name: dirichlet, alpha: 0.3}", "norms", [], True),
    ("count: 3, partition: {name: classes}", "norms", ["strategy.name=scaffold"], True),
    ("classes: [0, 1]}, {domain: digits, classes: [1, 2]", "norms", [], True),
    ("count: 3, partition: {name: dirichlet, alpha: 100.0}", "norms", [], False),
    ("count: 3", "norms", [], False),
    ("count: 3, partition: {name: classes}", "plain", [], False),
    ("count: 3, partition: {name: classes}", "norms", ["objective.batchnorm=own", "evaluation.where=sites"], False),
])  # fmt: skip
def test_a_mean_of_batchnorms_is_reported_where_sites_have_different_classes(
    tmp_path: Path, sites: str, network: str, words: list[str], message: bool
):
    config = configured(tmp_path, "strategy.name=fedavg", *words, network=network, sites=sites)
    advice = strategy_of(resolve(config)).warnings(resolve(config))
    assert any("with network.norm=group" in line for line in advice) == message, advice


def test_fedbn_keeps_batchnorm_at_the_sites(tmp_path: Path):
    run = played(tmp_path, "strategy.name=fedavg", "objective.batchnorm=own", "evaluation.where=sites", network="norms")
    state, start = network_of(run), run.aggregate.view().initial()
    norms = [name for name in state if name.split(".")[-1].startswith(("running", "num_batches"))]
    assert norms and all(torch.equal(state[name], start[name]) for name in norms)
    assert not any("running" in name for name in run.aggregate.view().contribution(NETWORKS, "site-0000"))
    assert set(run.loop.tables([run.aggregate.aggregate()], "test")[0][0]["accuracy"]) == {"digits", "union"}


def test_only_those_who_answered_count(tmp_path: Path):
    """With a share of the sites in each round the mean is over these, not over what others sent long ago."""
    run = played(tmp_path, "strategy.name=fedavg", "federation.fraction=0.34", "rounds=2")
    view = run.aggregate.view()
    last = [site.name for site in run.aggregate.members() if view.last_put(site.name) == 2]
    assert len(last) == 1
    for name, tensor in network_of(run).items():
        torch.testing.assert_close(tensor, view.contribution(NETWORKS, last[0])[name], atol=1e-6, rtol=1e-6)
    run.aggregate.membership.forget(last, {})
    assert digest(network_of(run)) == digest(run.aggregate.view().server_state(NETWORK))  # nothing but where the round began


def test_fedavg_is_a_plain_loops_with_the_same_batches(tmp_path: Path):
    """Whole-batch training of uneven sites, where no order of batches matters."""
    config = configured(tmp_path, "strategy.name=fedavg", "training.batch=4096", "rounds=3", "training.epochs=2",
                        sites="count: 3, partition: {name: dirichlet, alpha: 0.3}")  # fmt: skip
    ours = network_of(set_up(config).all_rounds())
    plain, accuracy = plain_fedavg(config, seed=0)
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-4)
    assert 0.0 < accuracy < 1.0


def test_the_plain_loop_leaves_whole_numbers_alone(tmp_path: Path):
    config = configured(tmp_path, "strategy.name=fedavg", "training.batch=4096", "rounds=2", network="norms")
    ours, (plain, _) = network_of(set_up(config).all_rounds()), plain_fedavg(config, seed=0)
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "word",
    ["federation.fraction=0.5", "training.weight_decay=0.1", "training.schedule=cosine", "training.clip=1",
     "training.steps=3", "training.label_smoothing=0.1", "training.augment=[RandomVerticalFlip]", "strategy.weighting=equal",
     "objective.batchnorm=own", "sites.0.flip=true"],
)  # fmt: skip
def test_the_plain_loop_refuses_what_it_does_not_do(tmp_path: Path, word: str):
    config = configured(tmp_path, "strategy.name=fedavg", word)
    with pytest.raises(UserError, match=r"^(sites|strategy|objective|[a-z]+\.[a-z_]+): got .*tables="):
        plain_fedavg(config, seed=0)


def test_fedavg_is_a_plain_loops_with_the_same_mini_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The plain loop with torch.optim.SGD, in the order in which our sites see their images."""
    config = configured(tmp_path, "strategy.name=fedavg", "rounds=3", "training.epochs=2",
                        sites="count: 3, partition: {name: dirichlet, alpha: 0.3}")  # fmt: skip
    turns = iter([(site, number) for number in (1, 2, 3) for site in config.roster])

    def trained(network: Network, part: object, config: Config) -> None:
        site, number = next(turns)
        optimiser = torch.optim.SGD(network.parameters(), lr=config.training.rate)
        for _, images, labels in batches(site_examples(config, site), resolve(config), site, number, torch.device("cpu")):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(network(images), labels).backward()
            optimiser.step()

    monkeypatch.setattr("fedloom.sims.experiments.plain_fedavg._train", trained)
    ours, (plain, _) = network_of(set_up(config).all_rounds()), plain_fedavg(config, seed=0)
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "scaffold", "fednova", "fedadam"])
def test_under_masks_the_unweighted_methods_have_the_bits_of_plain_sums(tmp_path: Path, name: str):
    words = [f"strategy.name={name}", "strategy.weighting=equal"]
    masked = played(tmp_path / "masked", *words, "federation.secure_aggregation=true")
    assert same(masked, played(tmp_path / "plain", *words))


def test_weights_under_masks_are_refused_with_what_to_set(tmp_path: Path):
    with pytest.raises(UserError, match=r"strategy\.weighting=equal"):
        configured(tmp_path, "strategy.name=fedavg", "federation.secure_aggregation=true")


def test_what_cannot_work_is_refused(tmp_path: Path):
    for words, message in [
        (["strategy.name=ditto", "training.clip=1"], r"training\.clip: ditto trains two networks"),
        (["strategy.name=scaffold", "training.clip=1"], r"training\.clip: strategy scaffold"),
        (["strategy.name=fednova", "training.clip=1"], r"training\.clip: strategy fednova"),
        (
            ["strategy.name=scaffold", "federation.clip_change=1"],
            r"federation\.clip_change: the server's variate would differ",
        ),
        (["strategy.name=scaffold", "privacy={clip: 1, noise: 1}"], r"privacy\.noise: the server's variate would differ"),
        (["strategy.name=fedadam", "objective.name=scaffold"], r"objective\.name: .*strategy\.name=scaffold"),
        (["strategy.name=fedavg", "objective.name=fednova"], r"objective\.name: .*strategy\.name=fednova"),
        (["strategy.name=scaffold", "training.rate=0"], r"training\.rate: got 0, but strategy scaffold"),
        (
            ["strategy.name=fednova", "training.optimizer={name: sgd, dampening: 0.1}"],
            r"training\.optimizer: strategy fednova takes sgd",
        ),
        (["strategy.name=fedavg", "objective.mode=x"], r"objective\.mode: got 'x', but this objective has no modes"),
        (["strategy.name=scaffold", "objective.name=fedavg"], r"objective\.name: got 'fedavg', strategy scaffold takes"),
    ]:
        with pytest.raises(UserError, match=message):
            configured(tmp_path, *words)


@pytest.mark.parametrize("name", ["fedadam", "scaffold"])
def test_what_is_read_again_from_the_ledger_continues_to_the_same_bits(tmp_path: Path, name: str):
    whole, cut = (set_up(configured(tmp_path / part, f"strategy.name={name}")) for part in ("whole", "cut"))
    whole.all_rounds()
    one_round(cut.loop, 1)
    cut.aggregate.slots.reload()
    one_round(cut.loop, 2)
    assert same(cut, whole)
