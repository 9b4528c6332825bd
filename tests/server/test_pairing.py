"""A strategy that is named alone takes the sites' half that goes with it."""

import pytest

from fedloom.clients.objectives import OBJECTIVES
from fedloom.conf import load
from fedloom.conf.errors import UserError
from fedloom.conf.loading import experiment_names
from fedloom.conf.schema import Config
from fedloom.server.strategies import STRATEGIES
from fedloom.server.strategies.defaults import with_default_objective


def pair(experiment: str, *words: str) -> Config:
    return with_default_objective(load(experiment, words), words)


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_every_strategy_names_a_sites_half_that_there_is(name: str):
    assert OBJECTIVES.shipped(STRATEGIES.get(name).default_objective)


@pytest.mark.parametrize("experiment", experiment_names())
def test_experiments_that_name_both_halves_stay_as_they_are(experiment: str):
    config = load(experiment)
    found = with_default_objective(config)
    assert found == config or (experiment == "mnist_dirichlet" and found.objective == {"name": "fedavg"})


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fednova", "ditto"])
def test_a_method_by_its_name_alone(name: str):
    assert pair("mnist_dirichlet", f"strategy.name={name}").objective == {"name": name}


def test_options_of_the_sites_half_are_kept():
    words = ["strategy.name=fedprox", "objective.mu=0.5"]
    assert pair("mnist_dirichlet", *words).objective == {"name": "fedprox", "mu": 0.5}
    assert pair("usps_mnistm", *words).objective == {"name": "fedprox", "mu": 0.5}


def test_an_experiments_own_objective_gives_way_with_its_modes_where_it_does_not_fit():
    found = pair("usps_mnistm", "strategy.name=scaffold")
    assert (found.objective, found.baselines) == ({"name": "scaffold"}, [])
    assert pair("different_digits", "strategy.name=heterofl").objective["name"] == "heterofl"


def test_and_stays_where_it_fits():
    found = pair("different_digits", "strategy.name=inco")
    assert (found.objective["name"], found.baselines) == ("heterogeneous", load("different_digits").baselines)
    proximal = pair("digits", "strategy.name=fedadam", "objective={name: fedprox, mu: 0.1}")
    assert proximal.objective["name"] == "fedprox"


def test_what_is_named_is_never_replaced():
    assert pair("digits", "strategy.name=scaffold", "objective.name=local").objective["name"] == "local"
    assert with_default_objective(load("digits", ["strategy.name=scaffold"])).objective["name"] == "sum_aggregation"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy.name=fedprox", "strategy.mu=1"], r"strategy\.mu: is an option of the sites' half.*write objective\.mu"),
        (["strategy.name=ditto", "strategy.strength=1"], r"write objective\.strength"),
        (
            ["strategy.name=fedadam", "objective.rate=1"],
            r"objective\.rate: .* the server's half.*write strategy\.rate",
        ),
        (["strategy.name=fedadam", "strategy.beta1=1"], r"did you mean 'strategy\.beta_1'"),
        (["strategy.name=krum"], r"flwr\.serverapp\.strategy:Krum"),
        (["strategy.name=fedpro"], r"did you mean"),
    ],
)
def test_options_of_the_other_half_and_misspelt_ones_are_reported(words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        pair("mnist_dirichlet", *words)
