"""Smaller networks as parts of a larger one: what lies where, what changes nothing, means over those who hold an entry."""

import functools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.fusion.graph.channels import wire
from fedloom.fusion.submodels import Held, Submodel, mean_over_holders, submodel
from tests.fusion.parts import apart, images, network

DEEP, MIDDLE, SHALLOW = "mlp:widths=[9,9,9,6]", "mlp:widths=[9,9,6]", "mlp:widths=[9,6]"
PAIRS = [
    (DEEP, SHALLOW),
    (DEEP, MIDDLE),
    ("resnet26:width=0.125", "resnet10:width=0.125"),
    ("resnet18:width=0.125,norm=none", "resnet14:width=0.125,norm=none"),
]


def part(large: str, small: str, **options: object) -> tuple[nn.Module, nn.Module, Submodel, Tensor]:
    one, other, probe = network(large, 0), network(small, 1), images(3)
    found = submodel(wire(one, probe[:1]), wire(other, probe[:1]), names=(large, small), **options)  # pyright: ignore
    return one, other, found, probe


@functools.cache
def part_of_deep(small: str) -> Submodel:
    return part(DEEP, small)[2]


@pytest.mark.parametrize(("large", "small"), PAIRS)
def test_a_network_balanced_by_layers_that_change_nothing_is_the_same_function(large, small):
    one, other, found, probe = part(large, small)
    whole = mean_over_holders([Held(found, other.state_dict(), 3.0, lacking=1.0)], one.state_dict())
    one.load_state_dict(whole)
    assert apart(one, other, probe) < 1e-5
    taken = found.taken(whole)
    assert all(torch.equal(taken[name], tensor) for name, tensor in other.state_dict().items())


def test_channels_are_the_first_or_the_first_after_turning():
    for turn in (0, 2):
        one, _, found, _ = part("mlp:widths=[5,4]", "mlp:widths=[3,2]", turn=turn)
        state, taken = one.state_dict(), found.taken(one.state_dict())
        rows, columns = torch.arange(5).roll(turn)[:3], torch.arange(4).roll(turn)[:2]
        assert torch.equal(taken["extractor.1.weight"], state["extractor.1.weight"][rows])
        assert torch.equal(taken["extractor.3.weight"], state["extractor.3.weight"][columns][:, rows])
        assert torch.equal(taken["head.weight"], state["head.weight"][:, columns])
        assert torch.equal(taken["head.bias"], state["head.bias"])


def test_what_no_one_holds_stays():
    one, other, found, _ = part("mlp:widths=[5,4]", "mlp:widths=[3,2]")
    mean = mean_over_holders([Held(found, other.state_dict(), 1.0)], before := one.state_dict())
    weight = mean["extractor.3.weight"]
    assert torch.equal(weight[:2, :3], other.state_dict()["extractor.3.weight"])
    assert torch.equal(weight[2:], before["extractor.3.weight"][2:]) and torch.equal(
        weight[:, 3:], before["extractor.3.weight"][:, 3:]
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.integers(1, 500)), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.25, 1.0]),
)
def test_the_mean_is_that_over_the_holders(sites, lacking):
    texts = [SHALLOW, MIDDLE, DEEP]
    nets = [network(texts[kind], seed) for seed, (kind, _) in enumerate(sites)]
    held = [Held(part_of_deep(texts[kind]), net.state_dict(), float(weight), lacking)
            for net, (kind, weight) in zip(nets, sites, strict=True)]  # fmt: skip
    mean = mean_over_holders(held, before := network(DEEP, 0).state_dict())
    second = {0: None, 1: "extractor.3.weight", 2: "extractor.3.weight"}  # of the large one: its second layer
    third = {0: None, 1: None, 2: "extractor.5.weight"}
    for name, names in (("extractor.3.weight", second), ("extractor.5.weight", third)):
        total, whole = 0.0, torch.zeros(9, 9, dtype=torch.float64)
        for net, (kind, weight) in zip(nets, sites, strict=True):
            own = names[kind]
            share = weight if own else weight * lacking
            total += share
            whole += share * (net.state_dict()[own].double() if own else torch.eye(9))
        wanted = whole / total if total else before[name].double()
        torch.testing.assert_close(mean[name].double(), wanted, atol=1e-6, rtol=1e-5)


@given(st.integers(1, 10**6))
@settings(max_examples=20, deadline=None)
def test_of_one_architecture_it_is_its_mean_bit_for_bit(weight):
    one, found = network(DEEP, 0), part_of_deep(DEEP)
    total = ExactSum(32)
    total.add(quantise(one.state_dict(), 32), times=weight)
    mean = total.mean()
    new = mean_over_holders([Held(found, mean, float(weight), 0.5)], one.state_dict())
    assert all(torch.equal(new[name], tensor.double()) for name, tensor in mean.items())


@pytest.mark.parametrize(("large", "small", "message"), [
    (SHALLOW, DEEP, "is not a part of"),
    (DEEP, "mlp:widths=[9,9,7]", "'extractor.5.weight' has 7 channels, 'extractor.7.weight' 6, along dimension 0"),
    ("resnet18:width=0.125", DEEP, "the networks are of different families"),
    ("resnet18:width=0.125,norm=group", "resnet10:width=0.0625,norm=group", "channels"),
    ("resnet18:width=0.125,norm=batch", "resnet10:width=0.125,norm=none", "is not a part of"),
    (DEEP, "mlp:widths=[9,6],bias=false", "of 'extractor.1' and 'extractor.1' only one has a bias"),
])  # fmt: skip
def test_what_is_not_a_part_is_refused_naming_both(large, small, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        part(large, small)
    assert large in str(caught.value) and small in str(caught.value)
