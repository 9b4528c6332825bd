"""Parts of the tests of fusion: named networks with random weights and statistics, images, how far two functions differ."""

import copy

import torch
from torch import Tensor, nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks import NetworkName, parse_name
from fedloom.fusion.cla_ot.matching import costs_between, match_units
from fedloom.fusion.graph.channels import Wiring, wire
from fedloom.fusion.probe import observe
from fedloom.fusion.settings import FusionSettings

AVERAGED = FusionSettings(refit="none")
PLAIN = FusionSettings(refit="none", repair=False)


def name_of(text: str, channels: int = 3, size: int = 32, classes: int = 10) -> NetworkName:
    return parse_name(text, Form.images(channels, size, classes))


def network(text: str, seed: int = 0, **images: int) -> nn.Module:
    """The named network in float64 and eval mode; everything is random, BatchNorm's statistics too."""
    return randomised(name_of(text, **images).build(), seed)


def randomised(network: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    network = network.double().eval()
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        with torch.no_grad():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2.0, generator=generator)
            elif tensor.is_floating_point():
                fan_in = tensor[0].numel() if tensor.dim() > 1 else 8
                tensor.normal_(0.0, (2.0 / fan_in) ** 0.5, generator=generator)
            else:
                tensor.fill_(3)
    return network


def images(count: int = 24, size: int = 32, channels: int = 3, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, size, size, generator=generator, dtype=torch.float64)


def outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return network(inputs)


def apart(one: nn.Module, other: nn.Module, inputs: Tensor) -> float:
    """The largest difference of two networks' outputs, relative to the largest output."""
    ours, theirs = outputs(one, inputs), outputs(other, inputs)
    assert theirs.std() > 1e-3
    return float((ours - theirs).abs().max() / theirs.abs().max())


def matches(deep: Wiring, shallow: Wiring, probe: Tensor) -> dict[int, int]:
    """Units of the one and their partners among those of the other, by CKA."""
    seen = [observe(wiring, probe, grams={unit.node for unit in wiring.units}) for wiring in (deep, shallow)]
    return match_units(deep, shallow, costs_between(deep.units, shallow.units, seen[0], seen[1], "cka"))


def hidden(network: nn.Module, example: Tensor, seed: int = 0) -> nn.Module:
    """The same function in another basis: all hidden channels permuted."""
    generator = torch.Generator().manual_seed(seed)
    wiring = wire(network, example[:1])
    state = wiring.permuted(network.state_dict(), wiring.permutations(generator))
    twin = copy.deepcopy(network)
    twin.load_state_dict(state)
    return twin
