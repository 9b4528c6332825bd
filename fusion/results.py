"""The result of a fusion, and what its steps pass on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedloom.fusion.agreement import Agreement
from fedloom.fusion.cla_ot.repair import Statistics
from fedloom.fusion.refit.targets import Mixture
from fedloom.fusion.state import State


@dataclass(frozen=True, eq=False)
class Fused:
    """The result of `fuse`. Tuples have one entry for each input network, in their order.

    Attributes:
        network: The fused network, in evaluation mode.
        alignment: For each layer (or block) of the shallower of two networks (this one and `depth`), its 0-based
            position in the deeper one.
        pairs: The alignment by layer names, as `align(networks[depth], network).pairs`.
        plans: By layer, [n, m] with columns that sum to 1: output m of the result as a mean of the network's n
            outputs. Empty for `into`. For a selection: 1 where output m is the network's output n.
        balanced: The network at the depth of the result; the input itself if nothing had to change.
        aligned: This network with its channels moved to the result's, before averaging; empty for a selection.
        costs: Transport costs by layer.
        seconds: Duration of each step.
        notes: What a user should know.
        agreement: How often the networks and the result give the joint answer on the probe set; None if their outputs
            are not logits of classes.
        classes: Names of the outputs, if `fuse` received names.
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
    agreement: Agreement | None = None
    classes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        agreed = f", agreement {self.agreement.fused:.2f}" if self.agreement else ""
        return f"Fused({type(self.network).__name__}, {self.parameters:,} parameters{agreed}, {len(self.notes)} notes)"

    @property
    def parameters(self) -> int:
        """The number of parameters of the network."""
        return sum(parameter.numel() for parameter in self.network.parameters())


@dataclass(frozen=True, eq=False)
class Made:
    """A fused network before refit and repair.

    Attributes:
        state: Its tensors.
        mixture: The mixture of all networks that its channels imitate.
        plans: For each network, how its channels moved, by layer.
        costs: For each network, the cost of its plans, by layer.
        aligned: The networks in the channels of the result.
        statistics: For each network, the statistics of its channels: on the probe set, and stored by BatchNorm.
        shares: By tensor, the weight of each network.
    """

    state: State
    mixture: Mixture
    plans: tuple[Mapping[str, Tensor], ...]
    costs: tuple[Mapping[str, float], ...] = ()
    aligned: tuple[nn.Module, ...] = ()
    statistics: Sequence[tuple[Mapping[str, Statistics], Mapping[str, Statistics]]] = ()
    shares: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class View:
    """What a network computes on the probe set, after it is brought to the result's depth.

    Attributes:
        features: By node, its values, [channels, n].
        seen: By layer, mean and deviation of its channels on the probe set. Repair uses them.
        own: By layer, mean and deviation that BatchNorm stored in training.
    """

    features: Mapping[str, Tensor]
    seen: Mapping[str, Statistics]
    own: Mapping[str, Statistics]


def averaged(states: list[State], shares: Mapping[str, list[float]]) -> State:
    """Return the weighted mean of states. `shares`: for each tensor, the weights of the states.

    A tensor that is not floating-point is copied from the first network that has it.
    """
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
