"""Transfer by the longest chain and by alignment, and Net2Net: what is copied, what stays, and when the function does."""

import pytest
import torch
from torch import nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks import parse_name
from fedloom.clients.networks.base import initialise
from fedloom.conf.errors import UserError
from fedloom.fusion.graph.channels import wire
from fedloom.sims.experiments.comparators.net2net import deepened
from fedloom.sims.experiments.comparators.transfer import by_chain, chain, common, transferred


def network(text: str, seed: int) -> nn.Module:
    made = parse_name(text, Form.images(3, 8, 5)).build()
    initialise(made, torch.Generator().manual_seed(seed))
    return made.eval()


def images() -> torch.Tensor:
    return torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def far(one: nn.Module, other: nn.Module) -> float:
    with torch.no_grad():
        return float((one(images()) - other(images())).abs().max())


@pytest.mark.parametrize("by", ["chain", "cla"])
@pytest.mark.parametrize("text", ["conv6:norm=none", "mlp:widths=[12,9]"])
def test_between_networks_of_one_structure_all_is_copied(text: str, by: str) -> None:
    source, target = network(text, 0), network(text, 1)
    assert far(source, target) > 0.01 and far(transferred(source, target, images(), by), source) == 0.0


def test_into_a_fresh_deeper_network_without_norms_the_function_goes_over_but_for_the_shortcuts() -> None:
    source, target = network("resnet18:width=0.125,norm=none", 0), network("resnet26:width=0.125,norm=none", 1)
    made = transferred(source, target, images())  # a fresh block's branch is zero: those that stay are identities
    state, theirs = made.state_dict(), source.state_dict()
    shortcuts = [name for name in theirs if "shortcut" in name]
    assert len(shortcuts) == 3 and all(torch.equal(state[name], target.state_dict()[name]) for name in shortcuts)
    made.load_state_dict({**state, **{name: theirs[name] for name in shortcuts}})
    assert far(made, source) < 1e-5


def test_layers_that_are_not_on_the_chain_stay_the_targets() -> None:
    source, target = network("resnet18:width=0.125,norm=batch", 0), network("resnet34:width=0.125,norm=batch", 1)
    pairs = dict(by_chain(source, target, images()))
    assert len(pairs) == 2 * 17 + 1  # every convolution of the chain with its norm, and the head
    made, own = transferred(source, target, images()).state_dict(), target.state_dict()
    for name, tensor in own.items():
        layer, _, part = name.rpartition(".")
        known = source.state_dict()[f"{pairs[layer]}.{part}"] if layer in pairs else tensor
        assert torch.equal(made[name], known)


def test_the_chain_runs_through_the_branches() -> None:
    names = chain(wire(network("resnet18:width=0.125,norm=none", 0), images()[:1]))
    assert len(names) == 18 and not [name for name in names if "shortcut" in name]


def test_common_subsequence_is_the_longest_and_the_earliest() -> None:
    assert common("aabcab", "abab") == [(0, 0), (2, 1), (4, 2), (5, 3)]
    assert common("ab", "cd") == []


def test_what_cannot_be_transferred_is_reported() -> None:
    with pytest.raises(UserError, match="takes one of: chain, cla"):
        transferred(network("conv6", 0), network("conv6", 1), images(), by="luck")
    with pytest.raises(UserError, match="use networks of equal widths"):
        transferred(network("mlp:widths=[12,9]", 0), network("mlp:widths=[12,10,9]", 1), images(), by="cla")


@pytest.mark.parametrize(
    "pair", [("mlp:widths=[12,9]", "mlp:widths=[16,12,10,7]"), ("resnet18:width=0.125", "resnet34:width=0.25")]
)
def test_a_deepened_network_does_what_it_did(pair: tuple[str, str]) -> None:
    source, deeper = (network(text, seed) for seed, text in enumerate(pair))
    made = deepened(source, deeper, images())
    assert far(made, source) < 1e-5
    assert len(wire(made, images()[:1]).units) == len(wire(deeper, images()[:1]).units)
