"""Every family of torchvision, and networks as others write them: a permutation of all channels leaves the function as it
was, and is found again by `fuse`."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedloom.fusion.graph.channels import Wiring, wire
from fedloom.fusion.graph.resize import with_state
from fedloom.fusion.pipeline import FusionSettings, fuse
from tests.fusion.families import MEMBERS, OTHERS, SMALL, filled, images, member

SETTINGS = FusionSettings(positions=256, refit="none")
FIXED = {"Mixer": ["down.weight"]}  # what it writes are positions, which stay those of the image


def permuted_copy(network: nn.Module, wiring: Wiring, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    return with_state(network, wiring.permuted(network.state_dict(), wiring.permutations(generator)))


def difference(one: nn.Module, other: nn.Module, inputs: Tensor) -> float:
    with torch.no_grad():
        ours, theirs = one(inputs), other(inputs)
    assert theirs.std() > 1e-6 * theirs.abs().max()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def check_free(network: nn.Module, wiring: Wiring) -> None:
    """All outputs of hidden layers lie on axes that are free; only the last layer's are fixed."""
    on = {(slot.tensor, slot.dim): axis for axis in wiring.axes for slot in axis.slots}
    fixed = {wiring.layers[-1].weight, *FIXED.get(type(network).__name__, ())}
    for layer in wiring.layers:
        dim = {"transposed": 1, "embedding": 1}.get(layer.kind, 0)
        if layer.weight:
            assert on[layer.weight, dim].fixed == (layer.weight in fixed), layer
    names = {name for name, _ in on}
    assert all(name in names for name, parameter in network.named_parameters() if parameter.numel() > 1)


def check_permutation(network: nn.Module, inputs: Tensor, bound: float) -> Wiring:
    wiring = wire(network, inputs[:1])
    twin = permuted_copy(network, wiring)
    moved = [axis for axis in wiring.axes if not axis.fixed and axis.slots and axis.size > 3]
    state, other = network.state_dict(), twin.state_dict()
    for axis in moved:
        assert any(not torch.equal(state[slot.tensor], other[slot.tensor]) for slot in axis.slots), axis
    assert difference(twin, network, inputs) < bound
    return wiring


@pytest.mark.parametrize("name", MEMBERS)
def test_a_permutation_of_all_channels_leaves_the_function(name):
    dtype = torch.float64 if name == "efficientnet_v2_s" else torch.float32  # with random weights it amplifies rounding
    network = filled(member(name), dtype=dtype)
    wiring = check_permutation(network, images(MEMBERS[name][0], 1, dtype), 1e-4)
    check_free(network, wiring)


@pytest.mark.parametrize("name", SMALL)
def test_fuse_finds_the_permutation(name):
    size, build = SMALL[name]
    check_fused(filled(build()), images(size, 32))


@pytest.mark.parametrize("name", OTHERS)
def test_networks_as_others_write_them(name):
    build, inputs = OTHERS[name]
    network = filled(build())
    wiring = check_permutation(network, inputs(3), 1e-9)
    check_free(network, wiring)


def check_fused(network: nn.Module, probe: Tensor) -> None:
    wiring = wire(network, probe[:1])
    check_free(network, wiring)
    twin = permuted_copy(network, wiring)
    assert difference(twin, network, probe[:2]) < 1e-9
    before = copy.deepcopy(twin.state_dict())
    fused = fuse([network, twin], into=0, probe=probe, settings=SETTINGS)
    assert difference(fused.aligned[1], network, probe[:2]) < 1e-9
    assert difference(fused.network, network, probe[:2]) < 1e-6
    assert all(torch.equal(tensor, before[key]) for key, tensor in twin.state_dict().items())


@pytest.mark.parametrize("name", [name for name in OTHERS if not name.startswith("gpt")])
def test_fuse_finds_the_permutation_of_others(name):
    build, inputs = OTHERS[name]
    check_fused(filled(build()), inputs(64))


@pytest.mark.parametrize("name", ["resnext", "swin", "densenet"])
def test_fuse_by_weights(name):
    size, build = SMALL[name]
    network, probe = filled(build()), images(size, 8)
    twin = permuted_copy(network, wire(network, probe[:1]))
    fused = fuse([network, twin], into=0, probe=probe, settings=replace(SETTINGS, basis="weights"))
    assert difference(fused.aligned[1], network, probe[:2]) < 1e-9
