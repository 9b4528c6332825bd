"""The layers of a site's network that can be shared, and their shared and own parameters."""

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
    """An architecture's groups of layers, from the input to the output, and the base learner that shares them."""

    groups: tuple[tuple[str, ...], ...]
    learner: BaseLearner

    @property
    def names(self) -> list[str]:
        """The names of all layers."""
        return [name for group in self.groups for name in group]

    def group_of(self, name: str) -> int:
        """Return the index of the group that the shared parameter with this name belongs to."""
        return next(number for number, group in enumerate(self.groups) if name.rpartition(".")[0] in group)

    def shared(self, config: Config, site: Site) -> State:
        """Return the initial shared parameters, by layer and tensor, such as `extractor.0.weight`."""
        start = initial_state(config, site=site)
        return self._drawn(self.learner.shared, start, config.seed, SHARED)

    def own(self, config: Config, site: Site) -> State:
        """Return the site's initial own parameters of shared layers, seeded by its name."""
        start = initial_state(config, site=site)
        return self._drawn(self.learner.own, start, config.seed, site.name)

    def weights(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the shared layers' tensors, computed from shared and own parameters, by their names in the network."""
        weights: dict[str, Tensor] = {}
        for layer in self.names:
            made = self.learner.weights(_below(shared, layer), _below(own, layer))
            weights |= {f"{layer}.{name}": tensor for name, tensor in made.items()}
        return weights

    def has_statistics(self, config: Config, site: Site) -> bool:
        """Return whether the site's network has BatchNorm with running statistics."""
        return any(name.endswith("running_mean") for name in architecture_of(config, site).build().state_dict())

    def _drawn(self, draw: Callable[[State, torch.Generator], State], start: State, seed: int, who: str) -> State:
        state: State = {}
        for layer in self.names:
            tensors = {name: start[f"{layer}.{name}"] for name in (WEIGHT, BIAS) if f"{layer}.{name}" in start}
            made = draw(tensors, torch_generator(seed, "layer selection", who, layer))
            state |= {f"{layer}.{name}": tensor for name, tensor in made.items()}
        return state


@functools.lru_cache(maxsize=64)
def grouped(
    architecture: Architecture, names: tuple[str, ...], sizes: tuple[int, ...], learner: BaseLearner, most: int
) -> Layers:
    """Group the layers with these names (empty: all convolutions, or else all linear layers).

    `sizes`: layers of each group; empty: 1. Raises UserError for an unknown layer, sizes that do not match the layers,
    more than `most` groups, and groups that the network cannot be cut between.
    """
    network = architecture.build()
    known, usual = layers_of(network)
    if not known:
        raise UserError("network: layer selection needs convolutions or linear layers before the head; choose a network "
                        "that has them")  # fmt: skip
    if odd := [name for name in names if name not in known]:
        raise unknown("objective.layers", odd[0], known)
    among = [name for name in known if name in (names or usual)]
    chosen = [name for name in among if not _beside(name)] or among
    if sizes and sum(sizes) != len(chosen):
        fault = f"{' + '.join(map(str, sizes))} = {sum(sizes)}"
        raise UserError(f"objective.groups: {fault}, but there are {len(chosen)} layers: {', '.join(chosen)}")
    group_of = [group for group, size in enumerate(sizes or [1] * len(chosen)) for _ in range(size)]
    counted = itertools.accumulate(int(name in chosen) for name in among)  # counted layers up to each
    pairs = [(name, group_of[max(0, number - 1)]) for name, number in zip(among, counted, strict=True)]
    groups = [tuple(name for name, group in pairs if group == number) for number in dict.fromkeys(group_of)]
    if len(groups) > most:
        fault = f"{len(groups)} groups of layers have {2 ** len(groups)} configurations"
        fault = f"{fault}, but objective.limit={most} allows {2**most}"
        example = _example(len(chosen), min(most, 4))
        raise UserError(f"objective.groups: {fault}; group the {len(chosen)} layers, as in groups={example}")
    pieces(network, groups)  # raises if the network cannot be cut between groups
    state = network.state_dict()
    for name in among:
        if f"{name}.{WEIGHT}" not in state:
            fault = f"'{name}' computes its weight from others (a parametrization) and cannot be shared"
            raise UserError(f"objective.layers: {fault}; list only other layers")
        learner.check({part: state[f"{name}.{part}"] for part in (WEIGHT, BIAS) if f"{name}.{part}" in state}, name)
    return Layers(tuple(groups), learner)


def _beside(name: str) -> bool:
    """Return whether a layer is in a block's shortcut. It then joins the layer before it, and is not counted."""
    return bool({"shortcut", "downsample"} & {*name.split(".")})


def _example(layers: int, groups: int) -> list[int]:
    """Return sizes of `groups` groups of `layers` layers, the largest first."""
    return [layers // groups + (index < layers % groups) for index in range(groups)]


def _below(state: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
    return {name.rpartition(".")[2]: tensor for name, tensor in state.items() if name.rpartition(".")[0] == layer}
