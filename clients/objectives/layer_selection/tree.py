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
        self.names = [{own: names[id(one)] for own, one in segment.named_parameters()} for segment in self.segments]
        self.alone = [any(isinstance(one, _BatchNorm) for one in segment.modules()) for segment in self.segments]

    def scores(self, configurations: Sequence[Configuration], shared: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the network's outputs [configurations, n, classes].

        `shared`: the weights of shared layers, by the names of the network's parameters. Features are computed once for all
        configurations that agree on the layers so far.
        """
        features = images[None]
        known: dict[Configuration, int] = {(): 0}
        for place in range(len(self.segments) - 1):
            prefixes = dict.fromkeys(one[: place + 1] for one in configurations)
            ways = [[one for one in prefixes if one[-1] == bit] for bit in (0, 1)]
            parts = [self._through(place, bit, shared, _chosen(features, [known[one[:-1]] for one in way]))
                     for bit, way in enumerate(ways) if way]  # fmt: skip
            features = torch.cat(parts) if len(parts) > 1 else parts[0]
            known = {one: number for number, one in enumerate([*ways[0], *ways[1]])}
        scores = self._through(len(self.segments) - 1, 0, shared, features)
        return _chosen(scores, [known[one] for one in configurations])

    def _through(self, place: int, bit: int, shared: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """Apply one segment to features [k, n, ...]. BatchNorm sees each configuration's images separately."""
        segment = self.segments[place]
        given = {own: shared[name] for own, name in self.names[place].items() if name in shared} if bit else {}

        def apply(one: Tensor) -> Tensor:
            return functional_call(segment, given, (one,)) if given else segment(one)

        if self.alone[place]:
            return torch.stack([apply(one) for one in features])
        return apply(features.flatten(0, 1)).unflatten(0, features.shape[:2])


def _chosen(features: Tensor, rows: list[int]) -> Tensor:
    return features if rows == list(range(len(features))) else features[rows]


def operations(costs: Sequence[float], configurations: Iterable[Configuration]) -> float:
    """Return the cost of one evaluation of the tree. `costs`: of one evaluation of each segment; the last is the head."""
    found = list(configurations)
    prefixes = [len({one[: place + 1] for one in found}) for place in range(len(costs) - 1)]
    return sum(cost * number for cost, number in zip(costs, [*prefixes, len(set(found))], strict=True))


def layers_of(network: Network) -> tuple[list[str], list[str]]:
    """Return the extractor's convolutions and linear layers, and the default layers to share, both in order.

    The default is all convolutions, or all linear layers of a network without convolutions.
    """
    kinds = {f"extractor.{name}": type(one) for name, one in network.extractor.named_modules()
             if isinstance(one, nn.Conv2d | nn.Linear)}  # fmt: skip
    convolutions = [name for name, kind in kinds.items() if issubclass(kind, nn.Conv2d)]
    return list(kinds), convolutions or list(kinds)
