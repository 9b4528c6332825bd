"""Wiring: any allowed permutation of a hidden axis leaves the network as it was."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision import models
from torchvision.models import vgg

from fedloom.clients.data.form import Form
from fedloom.clients.networks.base import NETWORKS
from fedloom.clients.networks.plain import StandardisedConv2d
from fedloom.fusion.graph.channels import permuted, wire
from tests.fusion.wirings import (
    LeNet,
    Merging,
    SmallCnn,
    check,
    cifar_vgg,
    groups,
    images,
    mlp,
    outputs,
    randomise,
    resnet,
    torchvision_vgg,
)

seeds = st.integers(0, 2**31)
widths = st.lists(st.integers(1, 5), min_size=1, max_size=4)
VGG_GROUPS = {"A": [1, 1, 2, 2, 2], "B": [2] * 5, "D": [2, 2, 3, 3, 3], "E": [2, 2, 4, 4, 4]}


@given(widths, st.booleans(), st.sampled_from([None, nn.BatchNorm1d, nn.LayerNorm]), seeds)
@settings(max_examples=25, deadline=None)
def test_random_mlps(hidden, bias, norm, seed):
    wiring = check(mlp([12, *hidden, 3], bias, norm), torch.randn(4, 12), seed)
    assert len(wiring.axes) == len(hidden) + 2
    assert [axis.fixed for axis in wiring.axes] == [True, *[False] * len(hidden), True]


@given(widths, st.booleans(), st.sampled_from(["none", "batch", "group", "one", "instance"]), st.booleans(), seeds)
@settings(max_examples=25, deadline=None)
def test_random_cnns(sizes, bias, norm, flat, seed):
    wiring = check(SmallCnn(sizes, bias, norm, flat), images(6, 2), seed)
    slot = next(slot for axis in wiring.axes for slot in axis.slots if slot.tensor == "hidden.weight" and slot.dim == 1)
    assert slot.repeat == (9 if flat else 1)


kinds = st.sampled_from(["none", "batch", "group"])


@given(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3), st.integers(1, 2), kinds, st.booleans(), seeds)
@settings(max_examples=25, deadline=None)
def test_random_resnets(sizes, depth, norm, ahead, seed):
    wiring = check(resnet(sizes, depth, norm, ahead), images(8), seed)
    assert [unit.kind for unit in wiring.units] == ["layer"] + ["block"] * depth * len(sizes)


def test_lenet_ends_in_log_softmax():
    wiring = check(LeNet(), images(28, 1))
    assert [axis.size for axis in wiring.axes] == [1, 6, 16, 120, 84, 10]
    assert groups(wiring) == [1, 1, 2]
    assert wiring.points[2] == ("conv2",)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("letter", ["A", "B", "D", "E"])
def test_vggs(letter, batch_norm):
    with torch.device("meta"):
        network = torchvision_vgg(letter, batch_norm)
    wiring = check(network, images(), singly=1)
    convolutions = sum(isinstance(width, int) for width in vgg.cfgs[letter])
    assert len(wiring.units) == convolutions + 2
    assert groups(wiring) == [*VGG_GROUPS[letter], 2]


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "wide_resnet50_2", "mobilenet_v2"])
def test_torchvision(name):
    with torch.device("meta"):
        network = getattr(models, name)(weights=None, num_classes=10)
    check(network, images(), singly=2)


def test_cifar_resnet56():
    wiring = check(resnet([16, 32, 64], 9), images(16), singly=2)
    assert groups(wiring) == [1, 9, 9, 9]
    assert sum(unit.identity_skip for unit in wiring.units) == 25


def test_pre_activation_wide_resnet():
    wiring = check(resnet([16, 32, 64], 2, ahead=True), images(16))
    assert groups(wiring) == [1, 2, 2, 2]
    stem, first, *_, before, last = wiring.units
    assert (stem.name, stem.layers) == ("0", ("0",))
    assert (first.name, first.layers) == ("1", ("1.norm1", "1.conv1", "1.norm2", "1.conv2"))
    assert before.layers == ("5.norm1", "5.conv1", "5.norm2", "5.conv2", "5.shortcut")
    assert (before.node, before.identity_skip) == ("_5_conv2", False)
    assert last.layers == ("6.norm1", "6.conv1", "6.norm2", "6.conv2", "7")  # the norm at the end has no other place
    assert last.identity_skip


@pytest.mark.parametrize("standardise", [False, True])
def test_groupnorm_vgg(standardise):
    with torch.device("meta"):
        network = NETWORKS.build({"name": "vgg11", "width": 0.25, "groups": 8, "standardise": standardise}, "n").build(
            Form.images(3, 32, 10)
        )
    wiring = check(network, images(), singly=3)
    assert [axis.groups for axis in wiring.axes if axis.slots] == [1, *[8] * 8, 1]
    assert isinstance(wiring.graph.get_submodule("extractor.0"), StandardisedConv2d) is standardise


def test_groupnorm_resnet():
    wiring = check(resnet([8, 16], 2, "group"), images(16))
    assert {axis.size: axis.groups for axis in wiring.axes if axis.slots and not axis.fixed} == {8: 4, 16: 8}


def test_groups_that_cross():
    """Of 2 and of 3 groups: channels move within what both have in common."""
    network = nn.Sequential(nn.Conv2d(3, 12, 1), nn.GroupNorm(2, 12), nn.GroupNorm(3, 12), nn.Conv2d(12, 2, 1))
    wiring = check(network, images(8))
    assert [axis.size for axis in wiring.axes if axis.slots and not axis.fixed] == [4, 2, 2, 4]


def test_across_groups_or_in_one_tensor_only_the_outputs_change():
    network, example = randomise(resnet([8, 16], 2, "group")), images(16).double()
    wiring, state = wire(network, example), dict(network.state_dict())
    stream = wiring.axes[wiring.units[1].axis]
    expected = outputs(network, state, example)
    across = permuted(state, stream, torch.tensor([2, 1, 0, 3, 4, 5, 6, 7]))
    assert not torch.allclose(outputs(network, across, example), expected, atol=1e-3)
    allowed = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    assert torch.allclose(outputs(network, permuted(state, stream, allowed), example), expected, atol=1e-9)
    for slot in stream.slots:
        one = permuted(state, replace(stream, slots=(slot,)), allowed)
        assert not torch.allclose(outputs(network, one, example), expected, atol=1e-6), slot


def test_mlp_of_five_hidden_layers():
    wiring = check(mlp([8, 7, 6, 5, 4, 3, 2]), torch.randn(3, 8))
    assert [axis.size for axis in wiring.axes] == [8, 7, 6, 5, 4, 3, 2]
    assert [(unit.kind, unit.group, unit.axis, unit.shape) for unit in wiring.units] == [
        ("layer", 0, index, (8 - index,)) for index in range(1, 6)
    ]
    assert [(layer.inputs, layer.outputs) for layer in wiring.layers] == [(index, index + 1) for index in range(6)]


@pytest.mark.parametrize(("letter", "count"), [("A", 8), ("B", 10)])
def test_cifar_vgg(letter, count):
    with torch.device("meta"):
        network = cifar_vgg(letter)
    wiring = check(network, images(), singly=1)
    assert (len(wiring.axes), len(wiring.layers), len(wiring.units)) == (count + 2, count + 1, count)
    assert groups(wiring) == VGG_GROUPS[letter]
    assert wiring.units[0].node == "_0_0" and wiring.units[0].shape == (64, 32, 32)


def test_harmless_operations_are_not_refused():
    merge = lambda a, b, scale: F.pad((a * scale - b / 2)[:, :, ::2], (1, 1)).clamp(min=0).unsqueeze(-1).squeeze(-1)  # noqa: E731
    check(
        nn.Sequential(Merging(merge), nn.PReLU(4), nn.Flatten(2), nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 2)),
        images(4),
    )
