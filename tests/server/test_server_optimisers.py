"""The server's optimisers against NumPy transcriptions of the published rules, over several rounds."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedloom.server.strategies.averaging import NETWORK, Averaging
from fedloom.server.strategies.fedavg import FedAvg
from fedloom.server.strategies.server_optimisers import FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi

Array = NDArray[np.float64]
SIZE = 5
means = st.lists(st.lists(st.floats(-3, 3, width=32), min_size=SIZE, max_size=SIZE), min_size=1, max_size=4)
PARAMETERS = frozenset({"weight"})


def played(strategy: Averaging, rounds: list[list[float]]) -> dict[str, torch.Tensor]:
    """The network after rounds of these means, from ones; its statistics are averaged, its counter is nobody's."""
    start = {"weight": torch.ones(SIZE), "statistics": torch.ones(SIZE), "counter": torch.tensor(7)}
    kept = {NETWORK: start, **{name: {"weight": strategy.initial_memory(name, start["weight"])} for name in strategy.memory}}
    for mean in rounds:
        kept = strategy.step(kept, {"weight": torch.tensor(mean), "statistics": torch.tensor(mean)}, PARAMETERS)
    return kept[NETWORK]


def algorithm_2(rounds: list[list[float]], rate: float, beta_1: float, tau: float,
                second: Callable[[Array, Array], Array]) -> Array:  # fmt: skip
    """Reddi et al. 2021, Alg. 2, lines 11 to 16."""
    x, m, v = np.ones(SIZE), np.zeros(SIZE), np.full(SIZE, tau**2)
    for mean in rounds:
        delta = np.asarray(mean) - x
        m = beta_1 * m + (1 - beta_1) * delta
        v = second(v, delta)
        x = x + rate * m / (np.sqrt(v) + tau)
    return x


RULES: dict[str, tuple[FedOpt, Callable[[Array, Array], Array]]] = {
    "adagrad": (FedAdagrad(rate=0.1, tau=0.01), lambda v, d: v + d**2),
    "adam": (FedAdam(rate=0.1, beta_1=0.8, beta_2=0.95, tau=0.01), lambda v, d: 0.95 * v + 0.05 * d**2),
    "yogi": (FedYogi(rate=0.1, beta_2=0.95, tau=0.01), lambda v, d: v - 0.05 * d**2 * np.sign(v - d**2)),
}


@pytest.mark.parametrize("name", RULES)
@given(rounds=means)
def test_adaptive_optimisers_are_algorithm_2(name: str, rounds: list[list[float]]):
    strategy, second = RULES[name]
    expected = algorithm_2(rounds, strategy.rate, strategy.beta_1, strategy.tau, second)
    np.testing.assert_allclose(played(strategy, rounds)["weight"].numpy(), expected, rtol=2e-3, atol=2e-3)


@given(rounds=means, rate=st.floats(0.1, 2), momentum=st.floats(0, 0.95))
def test_fedavgm_is_sgd_with_momentum_at_the_server(rounds: list[list[float]], rate: float, momentum: float):
    x, v = np.ones(SIZE), np.zeros(SIZE)
    for mean in rounds:
        v = momentum * v + (x - np.asarray(mean))
        x = x - rate * v
    found = played(FedAvgM(rate=rate, momentum=momentum), rounds)["weight"].numpy()
    np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-4)


@given(rounds=means)
def test_fedavgm_without_momentum_at_rate_1_is_fedavg_bit_for_bit(rounds: list[list[float]]):
    plain, moved = played(FedAvg(), rounds), played(FedAvgM(rate=1.0, momentum=0.0), rounds)
    assert all(torch.equal(plain[name], moved[name]) for name in plain)


@pytest.mark.parametrize("strategy", [FedAvgM(), FedAdam(), FedYogi(), FedAdagrad()])
def test_statistics_are_averaged_and_counters_left(strategy: Averaging):
    found = played(strategy, [[2.0] * SIZE, [3.0] * SIZE])
    assert torch.equal(found["statistics"], torch.full((SIZE,), 3.0))
    assert torch.equal(found["counter"], torch.tensor(7))
