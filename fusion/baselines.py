"""Baselines of fusion: the average of unaligned networks, and their ensemble."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.graph.resize import with_state


def naive_average(networks: Sequence[nn.Module]) -> nn.Module:
    """Return the mean of networks with equal shapes, without alignment. Raise UserError for a tensor of unequal shape."""
    states = [network.state_dict() for network in networks]
    mean = {}
    for name in dict.fromkeys(name for state in states for name in state):
        shapes = [list(state[name].shape) if name in state else None for state in states]
        if any(shape != shapes[0] for shape in shapes):
            raise UserError(f"naive average: tensor '{name}' has shapes {shapes}; use networks of one shape")
        parts = torch.stack([state[name] for state in states])
        mean[name] = parts.mean(dim=0) if parts.is_floating_point() else parts[0].clone()
    return with_state(networks[0], mean)


class Ensemble(nn.Module):
    """A network that returns the mean of several networks' class probabilities, by a forward pass for each."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, images: Tensor) -> Tensor:
        """Return class probabilities, [n, classes]."""
        return torch.stack([network(images).softmax(dim=-1) for network in self.networks]).mean(dim=0)
