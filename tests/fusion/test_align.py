"""Alignment of layers: the least sum under the constraints, by brute force; costs of layers; groups are never crossed."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.matching import layer_costs, match_units, optimal_alignment
from fedloom.fusion.graph.channels import WiringError, wire
from fedloom.fusion.probe import cka
from tests.fusion.parts import images, network

PINS = [(True, True), (True, False), (False, True), (False, False)]
seeds = st.integers(0, 2**31)


def candidates(m: int, n: int, pin_first: bool, pin_last: bool) -> np.ndarray:
    """All maps that the constraints allow, the preferred ones of equal sums first."""
    maps = [rows for rows in combinations(range(m), n) if not pin_first or rows[0] == 0]
    if pin_last and not (pin_first and n == 1):
        maps = [rows for rows in maps if rows[-1] == m - 1]
    return np.array(sorted(maps, key=lambda rows: rows[::-1]))


def brute_force(cost: np.ndarray, pins: tuple[bool, bool]) -> tuple[int, ...]:
    m, n = cost.shape
    maps = candidates(m, n, *pins)
    sums = np.zeros(len(maps))
    for column in range(cost.shape[1]):  # in the recursion's order, so that sums are equal bit for bit
        sums = sums + cost[maps[:, column], column]
    return tuple(int(row) for row in maps[np.argmin(sums)])


@pytest.mark.parametrize("pins", PINS)
def test_against_brute_force_with_ties(pins):
    random = np.random.default_rng(PINS.index(pins))
    for trial in range(3000):
        m = int(random.integers(1, 7))
        shape = m, int(random.integers(1, m + 1))
        cost = random.integers(0, 4, shape).astype(float) if trial % 2 else random.random(shape)
        assert optimal_alignment(cost, pin_first=pins[0], pin_last=pins[1]) == brute_force(cost, pins), cost


def test_a_single_column_prefers_the_first_layer():
    cost = np.array([[3.0], [1.0], [2.0]])
    found = [optimal_alignment(cost, pin_first=first, pin_last=last) for first, last in PINS]
    assert found == [(0,), (0,), (2,), (1,)]


def test_of_equal_sums_the_smaller_rows_from_the_last_column_on():
    assert optimal_alignment(np.zeros((5, 3)), pin_first=False, pin_last=False) == (0, 1, 2)
    assert optimal_alignment(np.zeros((5, 3))) == (0, 1, 4)
    assert optimal_alignment([[0, 9], [0, 0], [9, 0]], pin_first=False, pin_last=False) == (0, 1)


@pytest.mark.parametrize(
    ("cost", "line"),
    [
        (np.zeros((2, 3)), r"costs of shape \[2, 3\]; use \[m, n\] with m >= n"),
        (np.zeros((0, 0)), r"costs of shape \[0, 0\]"),
        (np.zeros((3, 0)), r"costs of shape \[3, 0\]"),
        (np.zeros(4), r"costs of shape \[4\]"),
        (np.array([[0.0, np.nan], [1.0, 1.0]]), "not all finite"),
        (np.array([[np.inf], [1.0]]), "not all finite"),
    ],
)
def test_costs_that_cannot_be_used(cost, line):
    with pytest.raises(UserError, match=line):
        optimal_alignment(cost)


def gram(x: Tensor) -> list[Tensor]:
    return [x @ x.T]


def straightforward(x: Tensor, y: Tensor) -> float:
    """CKA by the centring matrix."""
    centre = torch.eye(len(x)).double() - 1.0 / len(x)
    k, h = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    return float((k * h).sum() / ((k * k).sum() * (h * h).sum()).sqrt())


@given(seeds, st.integers(3, 12), st.integers(1, 8), st.integers(1, 8), st.floats(0.01, 100.0))
@settings(max_examples=60, deadline=None)
def test_cka_sees_neither_basis_nor_scale(seed, samples, d, e, scale):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(samples, width, generator=generator).double() for width in (d, e))
    turn = torch.linalg.qr(torch.randn(d, d, generator=generator).double())[0]
    value = cka(gram(x), gram(y))
    assert value == pytest.approx(straightforward(x, y), abs=1e-9)
    assert 0.0 <= value <= 1.0 + 1e-9
    assert cka(gram(x[:, torch.randperm(d, generator=generator)]), gram(y)) == pytest.approx(value, abs=1e-9)
    assert cka(gram(x @ turn * scale + 3.0), gram(y)) == pytest.approx(value, abs=1e-9)
    assert cka(gram(x), gram(x)) == pytest.approx(1.0)


def test_a_constant_layer_has_no_similarity():
    assert cka(gram(torch.zeros(5, 3).double()), gram(torch.randn(5, 3).double())) == 0.0


@pytest.mark.parametrize("text", ["mlp:widths=[12,9,7]", "vgg11:width=0.0625,norm=batch", "resnet18:width=0.0625"])
def test_a_network_costs_nothing_to_itself(text):
    built = network(text)
    cost = layer_costs(built, built, images(12))
    assert cost.dtype == np.float64 and cost.shape == (len(cost), len(cost))
    assert np.abs(cost.diagonal()).max() < 1e-9
    assert np.allclose(cost, cost.T) and cost.min() > -1e-9 and cost.max() < 1 + 1e-9


def preactivations(built: nn.Module, probe: Tensor) -> list[Tensor]:
    """Outputs of the hidden linear layers of an MLP."""
    seen: list[Tensor] = []
    layers = [module for module in built.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_hook(lambda _, __, value: seen.append(value.clone())) for layer in layers[:-1]]
    with torch.no_grad():
        built(probe)
    for handle in handles:
        handle.remove()
    return seen


def test_cka_costs_are_those_of_the_preactivations():
    a, b, probe = network("mlp:widths=[12,9,7]"), network("mlp:widths=[8,6]", 1), images(20)
    expected = [[1 - straightforward(x, y) for y in preactivations(b, probe)] for x in preactivations(a, probe)]
    np.testing.assert_allclose(layer_costs(a, b, probe), expected, atol=1e-9)


def test_wasserstein_costs_at_equal_widths_are_assignments():
    a, b, probe = network("mlp:widths=[8,8,8]"), network("mlp:widths=[8,8]", 1), images(20)
    cost = layer_costs(a, b, probe, dissimilarity="wasserstein")
    for i, x in enumerate(preactivations(a, probe)):
        for j, y in enumerate(preactivations(b, probe)):
            distances = torch.cdist(x.T, y.T).numpy()
            assert cost[i, j] == pytest.approx(distances[linear_sum_assignment(distances)].mean())


def test_wasserstein_between_resolutions_is_infinite():
    built = network("vgg11:width=0.0625,norm=batch")
    cost = layer_costs(built, built, images(2), dissimilarity="wasserstein")
    sizes = [unit.shape[1] for unit in wire(built, images(1)).units]
    assert np.array_equal(np.isinf(cost), np.not_equal.outer(sizes, sizes))


def test_neurons_are_counted():
    a, b = network("mlp:widths=[12,9,7]"), network("mlp:widths=[8,6]", 1)
    cost = layer_costs(a, b, images(2), representation="neurons", dissimilarity="ignored")
    assert cost.tolist() == [[16.0, 36.0], [1.0, 9.0], [1.0, 1.0]]


@pytest.mark.parametrize("names", [{"representation": "postactivation"}, {"dissimilarity": "cca"}])
def test_unknown_comparisons(names: dict[str, Any]):
    a = network("mlp:widths=[4]")
    with pytest.raises(UserError, match="layer_costs: no comparison of"):
        layer_costs(a, a, images(4), **names)


def test_errors_say_which_network():
    with pytest.raises(WiringError, match="network 1: "):
        layer_costs(network("mlp:widths=[4]"), nn.Sequential(nn.Flatten(0), nn.Linear(3072, 2)).double(), images(4))


PAIRS = [("vgg13", "vgg11"), ("vgg19", "vgg11"), ("resnet34", "resnet18"), ("resnet56", "resnet20")]


@pytest.mark.parametrize("pins", PINS)
@pytest.mark.parametrize(("deeper", "shallower"), PAIRS)
def test_groups_are_never_crossed(deeper, shallower, pins):
    deep, shallow = (wire(network(f"{name}:width=0.0625,norm=batch"), images(1)) for name in (deeper, shallower))
    cost = np.random.default_rng(0).random((len(deep.units), len(shallow.units)))
    found = match_units(deep, shallow, cost, pin_first=pins[0], pin_last=pins[1])
    assert all(deep.units[i].group == shallow.units[j].group for i, j in found.items())
    assert sorted(found.values()) == list(range(len(shallow.units)))
    assert [found[i] for i in sorted(found)] == sorted(found.values())
    back = match_units(shallow, deep, cost.T, pin_first=pins[0], pin_last=pins[1])
    assert {i: j for j, i in back.items()} == found


@pytest.mark.parametrize(
    ("one", "other"),
    [("vgg11", "resnet18"), ("mlp", "vgg11"), ("conv6", "vgg11"), ("resnet18", "resnet20"), ("mlp:widths=[]", "mlp")],
)
def test_different_families_do_not_match(one, other):
    a, b = (wire(network(text), images(1)) for text in (one, other))
    with pytest.raises(UserError, match="the networks are of different families; groups of layers: "):
        match_units(a, b, np.zeros((len(a.units), len(b.units))))
