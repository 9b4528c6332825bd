"""Networks that were trained apart, brought to one basis: aligned, transported and refitted into the reference.

Networks with different starts have no channel in common, so their mean is useless. They are fused into one network of the
reference's architecture (CLA+OT with refit, fusion.fuse). Every other architecture is fused of this network and its own
ones, and its channels are then aligned to the reference.
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch
from torch import Tensor, nn

from fedloom.clients.data.form import TOKENS, Form
from fedloom.clients.data.schema import CLASS, NEXT
from fedloom.clients.networks import Architecture, initialise
from fedloom.conf.errors import UserError
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from fedloom.fusion.state import State
from fedloom.fusion.submodels import Submodel
from fedloom.server.strategies.architectures import Group

LARGE = 2**24  # bytes of a network whose copies are freed at once: a search for cycles takes a tenth of a second
TOGETHER = 4  # networks to fuse at once, which limits memory; more are fused step by step
BLIND = FusionSettings(basis="weights", comparison="neurons", refit="none", repair=False)  # without probe images
PART = FusionSettings(basis="same", refit="plans")
MOVED = FusionSettings(refit="none", repair=False)  # to another network's basis, by permutation


@dataclass(frozen=True)
class Apart:
    """A network trained from its own start. `weight`: the number of images that it has seen."""

    architecture: Architecture
    state: State
    weight: float


def settings_for(probe: bool, task: str) -> FusionSettings:
    """Return the settings to fuse networks trained apart, with `probe` images or by weights alone."""
    return answering(task, FusionSettings()) if probe else BLIND


def answering(task: str, settings: FusionSettings) -> FusionSettings:
    """Return settings for networks that answer with classes or tokens, or with other numbers."""
    return settings if task in (CLASS, NEXT) else replace(settings, answers="values")


def fused_apart(
    reference: Architecture,
    apart: Iterable[Apart],
    before: State,
    probe: Tensor | None,
    settings: FusionSettings,
) -> State:
    """Return a network of the reference's architecture that combines the networks trained apart.

    Args:
        reference: The architecture of the result.
        apart: The networks. They are read one after the other.
        before: A state of the reference. It sets the shapes, if no network in `apart` has this architecture.
        probe: Images, float32 [k, c, h, w], or None: plans from weights, without refit.
        settings: Those of `settings_for`, or others.

    Raises:
        UserError: The networks cannot be fused.
    """
    rest, into = iter(apart), Apart(reference, before, 0.0)
    while chunk := list(islice(rest, TOGETHER)):
        if into.weight == 0.0 and (index := _first_of(chunk, reference)) is not None:
            into = chunk.pop(index)
        if chunk:
            into = Apart(reference, _fused([into, *chunk], probe, settings), into.weight + sum(one.weight for one in chunk))
            if sum(tensor.nbytes for tensor in into.state.values()) > LARGE:
                gc.collect()  # traced networks are in cycles
    return into.state


def part_of(
    group: Group,
    part: Submodel,
    whole: Apart,
    apart: Iterable[Apart],
    probe: Tensor | None,
    task: str,
) -> State:
    """Return the group's network, as a state whose channels are in the order of the reference's.

    If the group has the reference's widths, fuse the reference with the sites' networks of this architecture, then put the
    channels in the reference's order. If its widths are smaller, cut the part out of the reference, and fit it to give the
    reference's outputs.

    Args:
        group: The sites of one architecture.
        part: Where the group's network lies in the reference.
        whole: The reference: the network that contains all others.
        apart: The sites' networks, each trained from its own start.
        probe: Images on which networks are compared. None: return the part of the reference unchanged.
        task: The task of the targets, such as class or regression.
    """
    state, own = part.taken(whole.state), group.architecture
    if probe is None or own == whole.architecture:
        return state
    goal = _network(whole.architecture, whole.state)
    if all(entries is None for _, index in part.places.values() for entries in index):
        network = _network(own, fused_apart(own, chain([whole], apart), state, probe, settings_for(True, task)))
        return _state(fuse([network, goal], into=1, depth=0, probe=probe, weights=(1.0, 0.0), settings=MOVED).network, own)
    pair, settings = [_network(own, state), goal], answering(task, PART)
    return _state(fuse(pair, into=0, probe=probe, weights=(0.0, 1.0), settings=settings).network, own)


def check_fusing(reference: Group, groups: Iterable[Group], settings: FusionSettings, key: str) -> None:
    """Refuse an architecture that cannot be fused into the reference's, tested with random weights.

    Raises:
        UserError: The message names the option `key`, both architectures and a site.
    """
    for group in groups:
        generator = torch.Generator().manual_seed(0)
        own = [_drawn(architecture, generator) for architecture in (reference.architecture, group.architecture)]
        noise = _noise(reference.architecture.form, generator)
        try:
            pair = [Apart(reference.architecture, own[0], 1.0), Apart(group.architecture, own[1], 1.0)]
            _fused(pair, None if settings == BLIND else noise, settings)
        except UserError as error:
            into = "" if group is reference else f" into {reference.name}"
            raise UserError(f"{key}: {group.name} (of {group.site.name}) cannot be fused{into}: {error}") from None


def _noise(form: Form, generator: torch.Generator) -> Tensor:
    """Return four random examples: standard normal numbers, or tokens."""
    if form.kind == TOKENS:
        return form.random(4, generator)
    return torch.randn(4, *form.shape, generator=generator)


def _fused(apart: list[Apart], probe: Tensor | None, settings: FusionSettings) -> State:
    """Return the fusion into the first network's architecture."""
    networks = [_network(network.architecture, network.state) for network in apart]
    first = apart[0].architecture
    if probe is None:
        probe = first.form.zeros(2)
    if not any(network.weight for network in apart):
        apart = [replace(network, weight=1.0) for network in apart]
    fused = fuse(networks, into=0, probe=probe, weights=[network.weight for network in apart], settings=settings).network
    return _state(fused, first)


def _first_of(chunk: list[Apart], architecture: Architecture) -> int | None:
    return next((index for index, network in enumerate(chunk) if network.architecture == architecture), None)


def _network(architecture: Architecture, state: State) -> nn.Module:
    network = architecture.build().eval()
    network.load_state_dict(state, assign=True)
    return network


def _drawn(architecture: Architecture, generator: torch.Generator) -> State:
    network = architecture.build()
    initialise(network, generator)
    return dict(network.state_dict())


def _state(network: nn.Module, architecture: Architecture) -> State:
    """Return the fused network's state. Raise UserError if it needs biases that the architecture lacks."""
    state, own = dict(network.state_dict()), architecture.build().state_dict()
    if lacking := next((name for name in state if name not in own), ""):
        problem = f"network '{architecture.options['name']}' has no '{lacking}', but the refit needs it"
        raise UserError(f"{problem}; use layers with biases or norms, or a fusion without refit")
    return {name: tensor.detach().to(own[name].dtype) for name, tensor in state.items()}
