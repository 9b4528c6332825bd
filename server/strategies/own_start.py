"""Networks that were trained apart, brought into one basis: aligned, transported and refitted into the reference.

Networks of different starts have no channel in common, so that no mean of them is of use. They are fused (CLA+OT with refit,
fusion.fuse) into one network of the reference's architecture; every other architecture is fused in the same way, and its
channels are brought to those of the reference.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor, nn

from fedloom.clients.networks import Architecture, initialise
from fedloom.conf.errors import UserError
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from fedloom.fusion.state import State
from fedloom.fusion.submodels import Submodel
from fedloom.server.strategies.architectures import Group

TOGETHER = 8  # networks that are fused at once; more are fused one after the other, so that few are in memory
BLIND = FusionSettings(basis="weights", comparison="neurons", refit="none", repair=False)  # no probe samples
PART = FusionSettings(basis="same", refit="plans")
MOVED = FusionSettings(refit="none", repair=False)  # into another's basis, by permutations


@dataclass(frozen=True)
class Apart:
    """A network of a start of its own, and its weight: the number of images that it has seen."""

    architecture: Architecture
    state: State
    weight: float


def settings_for(probe: bool) -> FusionSettings:
    """Of the fusion of networks trained apart: without images, plans follow from weights."""
    return FusionSettings() if probe else BLIND


def fused_apart(
    reference: Architecture,
    apart: Iterable[Apart],
    before: State,
    probe: Tensor | None,
    settings: FusionSettings | None = None,
) -> State:
    """A network of the reference's architecture that does what all of them do.

    before: the reference's state where nobody has a network of its architecture, which then gives nothing but the shape;
    probe: [k, c, h, w] float32, or None: plans from weights, no refit; settings: by default those of `settings_for`. Raises
    UserError for networks that cannot be fused.
    """
    rest, into = iter(apart), Apart(reference, before, 0.0)
    settings = settings or settings_for(probe is not None)
    while chunk := list(islice(rest, TOGETHER)):
        if into.weight == 0.0 and (place := _first_of(chunk, reference)) is not None:
            into = chunk.pop(place)
        if chunk:
            into = Apart(reference, _fused([into, *chunk], probe, settings), into.weight + sum(one.weight for one in chunk))
    return into.state


def part_of(
    group: Group, part: Submodel, reference: Architecture, whole: State, apart: Iterable[Apart], probe: Tensor | None
) -> State:
    """The network of an architecture in the basis of the reference `whole`.

    Of the same widths: all networks fused into this architecture, its channels then brought to those of the reference. Of
    smaller ones: the part of the reference, fitted to do what the whole one does. Without a probe: the part as it is.
    """
    state, own = part.taken(whole), group.architecture
    if probe is None or own == reference:
        return state
    goal = _network(reference, whole)
    if all(entries is None for _, index in part.places.values() for entries in index):
        alike = _network(own, fused_apart(own, apart, state, probe))
        return _state(fuse([alike, goal], into=1, depth=0, probe=probe, weights=(1.0, 0.0), settings=MOVED).network, own)
    return _state(fuse([_network(own, state), goal], into=0, probe=probe, weights=(0.0, 1.0), settings=PART).network, own)


def check_fusing(reference: Group, groups: Iterable[Group], settings: FusionSettings, key: str) -> None:
    """UserError, naming the option, both and a site, for an architecture that cannot be fused into the reference's: tried
    with random weights."""
    for group in groups:
        generator = torch.Generator().manual_seed(0)
        own = [_drawn(architecture, generator) for architecture in (reference.architecture, group.architecture)]
        one = reference.architecture
        noise = torch.randn(4, one.channels, one.size, one.size, generator=generator)
        try:
            pair = [Apart(reference.architecture, own[0], 1.0), Apart(group.architecture, own[1], 1.0)]
            _fused(pair, None if settings == BLIND else noise, settings)
        except UserError as error:
            into = "" if group is reference else f" into {reference.name}"
            raise UserError(f"{key}: {group.name} (of {group.site.name}) cannot be fused{into}: {error}") from None


def _fused(apart: list[Apart], probe: Tensor | None, settings: FusionSettings) -> State:
    """Into the first one's architecture."""
    networks = [_network(one.architecture, one.state) for one in apart]
    first = apart[0].architecture
    if probe is None:
        probe = torch.zeros(2, first.channels, first.size, first.size)
    if not any(one.weight for one in apart):
        apart = [replace(one, weight=1.0) for one in apart]
    fused = fuse(networks, into=0, probe=probe, weights=[one.weight for one in apart], settings=settings).network
    return _state(fused, first)


def _first_of(chunk: list[Apart], architecture: Architecture) -> int | None:
    return next((place for place, one in enumerate(chunk) if one.architecture == architecture), None)


def _network(architecture: Architecture, state: State) -> nn.Module:
    network = architecture.build().eval()
    network.load_state_dict(state)
    return network


def _drawn(architecture: Architecture, generator: torch.Generator) -> State:
    network = architecture.build()
    initialise(network, generator)
    return dict(network.state_dict())


def _state(network: nn.Module, architecture: Architecture) -> State:
    """UserError if the fused network needs biases that the architecture has not."""
    state, own = dict(network.state_dict()), architecture.build().state_dict()
    if odd := next((name for name in state if name not in own), ""):
        told = f"network '{architecture.options['name']}' has no '{odd}', which the refit needs"
        raise UserError(f"{told}; take layers with biases or norms, or fuse without a refit")
    return {name: tensor.detach().to(own[name].dtype) for name, tensor in state.items()}
