"""Evaluate a network under many transfer configurations at once. Equal first layers are computed once."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.clients.networks import Network
from fedloom.clients.networks.split import pieces
from fedloom.clients.objectives.layer_selection.configurations import Configuration


class Tree:
    """A network as a chain of groups of layers. Its own parameters belong to layers that are not shared."""

    def __init__(self, network: Network, groups: Sequence[Sequence[str]]) -> None:
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        self.segments = pieces(network, groups)
        self.names = [{own: names[id(module)] for own, module in segment.named_parameters()} for segment in self.segments]
        self.alone = [any(isinstance(module, _BatchNorm) for module in segment.modules()) for segment in self.segments]

    def scores(self, configurations: Sequence[Configuration], shared: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the network's outputs [configurations, n, classes].

        `shared`: the weights of shared layers, by the names of the network's parameters. Features are computed once for all
        configurations that agree on the layers so far.
        """
        features = images[None]
        known: dict[Configuration, int] = {(): 0}
        for depth in range(len(self.segments) - 1):
            prefixes = dict.fromkeys(configuration[: depth + 1] for configuration in configurations)
            ways = [[configuration for configuration in prefixes if configuration[-1] == bit] for bit in (0, 1)]
            rows = [[known[configuration[:-1]] for configuration in way] for way in ways]
            parts = [self._through(depth, bit, shared, _chosen(features, row)) for bit, row in enumerate(rows) if row]
            features = torch.cat(parts) if len(parts) > 1 else parts[0]
            known = {configuration: number for number, configuration in enumerate([*ways[0], *ways[1]])}
        scores = self._through(len(self.segments) - 1, 0, shared, features)
        return _chosen(scores, [known[configuration] for configuration in configurations])

    def _through(self, index: int, bit: int, shared: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """Apply one segment to features [k, n, ...]. BatchNorm sees each configuration's images separately."""
        segment = self.segments[index]
        weights = {own: shared[name] for own, name in self.names[index].items() if name in shared} if bit else {}

        def apply(images: Tensor) -> Tensor:
            return functional_call(segment, weights, (images,)) if weights else segment(images)

        if self.alone[index]:
            return torch.stack([apply(images) for images in features])
        return apply(features.flatten(0, 1)).unflatten(0, features.shape[:2])


def _chosen(features: Tensor, rows: list[int]) -> Tensor:
    return features if rows == list(range(len(features))) else features[rows]


def operations(costs: Sequence[float], configurations: Iterable[Configuration]) -> float:
    """Return the cost of `Tree.scores`. `costs`: cost of one evaluation of each group of layers; the last: of the head."""
    chosen = list(configurations)
    prefixes = [len({configuration[: depth + 1] for configuration in chosen}) for depth in range(len(costs) - 1)]
    return sum(cost * number for cost, number in zip(costs, [*prefixes, len(set(chosen))], strict=True))


def layers_of(network: Network) -> tuple[list[str], list[str]]:
    """Return the extractor's convolutions and linear layers, and the default layers to share, both in order.

    The default is all convolutions, or all linear layers of a network without convolutions.
    """
    kinds = {f"extractor.{name}": type(module) for name, module in network.extractor.named_modules()
             if isinstance(module, nn.Conv2d | nn.Linear)}  # fmt: skip
    convolutions = [name for name, kind in kinds.items() if issubclass(kind, nn.Conv2d)]
    return list(kinds), convolutions or list(kinds)
