"""What a fusion gives, and what its steps hand to one another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedloom.fusion.cla_ot.repair import Statistics
from fedloom.fusion.refit.targets import Mixture
from fedloom.fusion.state import State


@dataclass(frozen=True, eq=False)
class Fused:
    """The result of a fusion; one entry for each input network, in their order.

    `alignment`: for each layer (or block) of the shallower of two networks, this one and the one that gives the depth, its
    0-based place in the deeper. `pairs`: the same by names, as `align(networks[depth], network).pairs` gives it. `plans`: by
    layer, [n, m], columns sum to 1: output m of the result as a mean of the network's own n; empty for the network `into`;
    of a selection: 1 where output m is the network's own n. `balanced`: the network in the result's depth; `aligned`: and in
    its basis, not averaged (of a selection: none); where nothing has to change it is the input itself.
    `costs`: transport costs by layer. `seconds`: of each part. `notes`: what a user should know. `classes`:
    the names of the network's outputs, where names were given.
    """

    network: nn.Module
    alignment: tuple[tuple[int, ...], ...]
    pairs: tuple[Mapping[str, str], ...]
    plans: tuple[Mapping[str, Tensor], ...]
    balanced: tuple[nn.Module, ...]
    aligned: tuple[nn.Module, ...]
    costs: tuple[Mapping[str, float], ...]
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """How many numbers the network has."""
        return sum(parameter.numel() for parameter in self.network.parameters())


@dataclass(frozen=True, eq=False)
class Made:
    """A fused network's tensors before refit or repair, what its channels should do, and how they were made."""

    state: State
    mixture: Mixture
    plans: tuple[Mapping[str, Tensor], ...]
    costs: tuple[Mapping[str, float], ...] = ()
    aligned: tuple[nn.Module, ...] = ()
    statistics: Sequence[tuple[Mapping[str, Statistics], Mapping[str, Statistics]]] = ()
    shares: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class View:
    """Of a balanced network: values [channels, n] by node; by layer what repair has seen, and BatchNorms' own statistics."""

    features: Mapping[str, Tensor]
    seen: Mapping[str, Statistics]
    own: Mapping[str, Statistics]


def averaged(states: list[State], shares: Mapping[str, list[float]]) -> State:
    """The weighted mean, tensor by tensor; what is no number with a fraction is that of the first network that has it."""
    mean: State = {}
    for name, weights in shares.items():
        parts = [(weight, state[name]) for weight, state in zip(weights, states, strict=True) if weight]
        if not parts[0][1].is_floating_point():
            mean[name] = parts[0][1].clone()
            continue
        total = torch.zeros_like(parts[0][1], dtype=torch.float64)
        for weight, part in parts:
            total.add_(part, alpha=weight)
        mean[name] = total.to(parts[0][1].dtype)
    return mean
