"""The layers of a site's network that can be shared, and the states of their two kinds of parameters."""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.networks import Architecture, architecture_of
from fedloom.clients.networks.initial import SHARED, initial_state
from fedloom.clients.networks.split import pieces
from fedloom.clients.objectives.layer_selection.learners import BIAS, WEIGHT, BaseLearner
from fedloom.clients.objectives.layer_selection.tree import layers_of
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import State


@dataclass(frozen=True)
class Layers:
    """Groups of layers of one architecture, from the input to the output, and the base learner that shares them."""

    groups: tuple[tuple[str, ...], ...]
    learner: BaseLearner

    @property
    def names(self) -> list[str]:
        """Of all layers."""
        return [name for group in self.groups for name in group]

    def group_of(self, name: str) -> int:
        """The group of a shared parameter, by its name."""
        return next(place for place, group in enumerate(self.groups) if name.rpartition(".")[0] in group)

    def shared(self, config: Config, site: Site) -> State:
        """What all sites share, as the seed draws it: by layer and part, `extractor.0.weight`."""
        start = initial_state(config, site=site)
        return self._drawn(self.learner.shared, start, config.seed, SHARED)

    def own(self, config: Config, site: Site) -> State:
        """What the site adds to shared layers, as its name draws it."""
        start = initial_state(config, site=site)
        return self._drawn(self.learner.own, start, config.seed, site.name)

    def weights(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of shared layers, by the names that the network has for them."""
        found: dict[str, Tensor] = {}
        for layer in self.names:
            made = self.learner.weights(_below(shared, layer), _below(own, layer))
            found |= {f"{layer}.{name}": tensor for name, tensor in made.items()}
        return found

    def has_statistics(self, config: Config, site: Site) -> bool:
        """Whether the site's network has BatchNorm with running statistics."""
        return any(name.endswith("running_mean") for name in architecture_of(config, site).build().state_dict())

    def _drawn(self, draw: Callable[[State, torch.Generator], State], start: State, seed: int, who: str) -> State:
        found: State = {}
        for layer in self.names:
            tensors = {name: start[f"{layer}.{name}"] for name in (WEIGHT, BIAS) if f"{layer}.{name}" in start}
            made = draw(tensors, torch_generator(seed, "layer selection", who, layer))
            found |= {f"{layer}.{name}": tensor for name, tensor in made.items()}
        return found


@functools.lru_cache(maxsize=64)
def grouped(
    architecture: Architecture, names: tuple[str, ...], sizes: tuple[int, ...], learner: BaseLearner, most: int
) -> Layers:
    """Layers by these names (none: all that can be shared) in groups of these sizes (none: each alone).

    UserError for a layer that there is not, sizes that do not cover the layers, more than `most` groups, and groups that are
    not one behind the other.
    """
    network = architecture.build()
    known, usual = layers_of(network)
    if not known:
        raise UserError("network: layer selection shares convolutions or linear layers before the head, and it has none")
    if odd := [name for name in names if name not in known]:
        raise unknown("objective.layers", odd[0], known)
    among = [name for name in known if name in (names or usual)]
    chosen = [name for name in among if not _beside(name)] or among
    if sizes and sum(sizes) != len(chosen):
        told = f"{' + '.join(map(str, sizes))} = {sum(sizes)}"
        raise UserError(f"objective.groups: {told}, there are {len(chosen)} layers: {', '.join(chosen)}")
    group_of = [group for group, size in enumerate(sizes or [1] * len(chosen)) for _ in range(size)]
    counted = itertools.accumulate(int(name in chosen) for name in among)  # layers up to each that count
    pairs = [(name, group_of[max(0, number - 1)]) for name, number in zip(among, counted, strict=True)]
    groups = [tuple(name for name, group in pairs if group == one) for one in dict.fromkeys(group_of)]
    if len(groups) > most:
        told = (
            f"{len(groups)} groups of layers have {2 ** len(groups)} configurations, objective.limit={most} takes {2**most}"
        )
        example = _example(len(chosen), min(most, 4))
        raise UserError(f"objective.groups: {told}; group the {len(chosen)} layers, as in groups={example}")
    pieces(network, groups)  # which have to be told apart
    state = network.state_dict()
    for name in among:
        if f"{name}.{WEIGHT}" not in state:
            told = f"'{name}' makes its weight out of others (a parametrization) and cannot be shared"
            raise UserError(f"objective.layers: {told}; name layers without it")
        learner.check({part: state[f"{name}.{part}"] for part in (WEIGHT, BIAS) if f"{name}.{part}" in state}, name)
    return Layers(tuple(groups), learner)


def _beside(name: str) -> bool:
    """Whether a layer is in a block's shortcut: it goes with the layer before it, and does not count."""
    return bool({"shortcut", "downsample"} & {*name.split(".")})


def _example(layers: int, groups: int) -> list[int]:
    """So many layers in so many groups, the first the largest."""
    return [layers // groups + (place < layers % groups) for place in range(groups)]


def _below(state: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
    return {name.rpartition(".")[2]: tensor for name, tensor in state.items() if name.rpartition(".")[0] == layer}
