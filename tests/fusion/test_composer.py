"""A network that is many combinations one after the other, written in place: each is what the exact combination says."""

from collections.abc import Sequence

import pytest
import torch

from fedloom.conf.errors import UserError
from fedloom.fusion.arithmetic import GRADIENTS, Alpha, Composer, to_state
from fedloom.fusion.state import State
from tests.fusion.test_arithmetic import BITS, HOW, combine, fresh, prepared, same, trained_states


def reshaped(state: State) -> State:
    return {**state, "head.bias": state["head.bias"][:-1]}


def lacking(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name != "head.bias"}


def by_layer(layers: Sequence[str], seed: int) -> dict[str, float]:
    draw = torch.Generator().manual_seed(seed)
    return {layer: float(torch.rand((), generator=draw)) for layer in layers}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["one number", "by layer"])
@pytest.mark.parametrize("options", ["", ",affine=false"])
def test_a_composer_writes_what_the_exact_combination_says(how, kind, options):
    states = trained_states(options)
    start, gradients = prepared(states)
    network = fresh(options)
    composer = Composer(network, states[0], states[1:], how)
    for seed in (3, 4, 0):  # again: nothing of the one before is left
        rows: list[Alpha] = [by_layer(composer.layers, seed), by_layer(composer.layers, seed + 10)]
        alphas = rows if kind == "by layer" else [0.3 * seed, -0.1 * seed]
        expected = to_state(combine(start, gradients, alphas, how), states[0], BITS)
        assert composer(alphas) is network
        for name, tensor in network.state_dict().items():
            assert torch.allclose(tensor, expected[name], atol=1e-6) or name.endswith("num_batches_tracked"), name


@pytest.mark.parametrize("how", HOW)
def test_a_composer_leaves_a_network_that_computes_as_any_other_and_takes_any_state(how):
    states, images = trained_states(), torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(5))
    network, other = fresh(), fresh()
    network.load_state_dict(states[2])
    composer = Composer(network, states[0], states[1:], how)
    composer([0.25, 0.75])
    counters = [name for name in states[0] if name.endswith("num_batches_tracked")]
    assert all(torch.equal(network.get_buffer(name), states[2][name]) for name in counters)
    other.load_state_dict({name: tensor.clone() for name, tensor in network.state_dict().items()})
    assert torch.equal(network.eval()(images), other.eval()(images))
    for state in states:
        network.load_state_dict(state)
        other.load_state_dict(state)
        assert same(network.state_dict(), state)
        assert torch.equal(network(images), other(images))
    with torch.no_grad():
        network.get_parameter("head.weight").zero_()
    assert torch.equal(network.get_parameter("head.bias"), states[2]["head.bias"])  # views that do not overlap


@pytest.mark.parametrize("change", [reshaped, lacking])
def test_networks_of_another_shape_are_refused_and_the_tensor_named(change):
    theta, *ends = trained_states()
    with pytest.raises(UserError, match=r"network 2: tensor 'head\.bias' is"):
        Composer(fresh(), theta, [ends[0], change(ends[1])], GRADIENTS)
