"""CLA+OT and the methods it is compared with, as functions from trained networks to one network."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from fedloom.clients.networks.base import initialise
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.baselines import Ensemble, naive_average
from fedloom.fusion.graph.channels import wire
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from fedloom.sims.experiments.comparators.net2net import deepened
from fedloom.sims.experiments.comparators.transfer import transferred

REFERENCE = FusionSettings.reference()  # the paper's public code
AVERAGED = FusionSettings(refit="none")  # ours: averaged, one plan for each axis, statistics repaired
REFIT = FusionSettings()  # ours: channels selected from all networks, layers fitted again


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a method receives: trained networks (A, the deeper, and B in turn), unlabelled images [k, ...], and a seed."""

    networks: list[nn.Module]
    probe: Tensor
    seed: int

    @property
    def deep(self) -> nn.Module:
        """The network A."""
        return self.networks[0]

    @property
    def shallow(self) -> nn.Module:
        """The network B."""
        return self.networks[1]


Method = Callable[[Inputs], nn.Module]  # raises UserError if it cannot make such a network


def fused(inputs: Inputs, settings: FusionSettings, depth: int = 0) -> nn.Module:
    """Return the networks fused into one. Of two, it has B's widths, and the layers of A (`depth` 0) or B (1).

    More than two are aligned to the deepest one, A (CLA+OT, Sec. 3.3).
    """
    into = 1 if len(inputs.networks) == 2 else 0
    return fuse(inputs.networks, into=into, depth=depth, probe=inputs.probe, settings=settings).network


def fresh(network: nn.Module, seed: int) -> nn.Module:
    """Return a copy of the network with newly drawn weights."""
    drawn = copy.deepcopy(network)
    initialise(drawn, torch_generator(seed, "another start"))
    return drawn


def _parent(inputs: Inputs, index: int) -> nn.Module:
    return copy.deepcopy(inputs.networks[index])


def _naive(inputs: Inputs) -> nn.Module:
    even = (network if index % 2 == 0 else _deepened(inputs, index) for index, network in enumerate(inputs.networks))
    return naive_average(list(even))


def _deepened(inputs: Inputs, index: int = 1) -> nn.Module:
    return deepened(inputs.networks[index], inputs.deep, inputs.probe)


def otfusion(inputs: Inputs, settings: FusionSettings = REFERENCE) -> nn.Module:
    """Return networks of equal depth fused into one. Raises UserError if the depths differ."""
    depths = [len(wire(network, inputs.probe[:1]).units) for network in inputs.networks]
    if len(set(depths)) > 1:
        raise UserError(f"OTFusion: networks of {depths} hidden layers or blocks; takes networks of one depth")
    return fused(inputs, settings)


def _transferred(inputs: Inputs, by: str) -> nn.Module:
    return transferred(inputs.shallow, inputs.deep, inputs.probe, by)


def _into_transferred(inputs: Inputs, by: str, settings: FusionSettings) -> nn.Module:
    return otfusion(replace(inputs, networks=[inputs.deep, _transferred(inputs, by)]), settings)


STARTS: dict[str, Method] = {
    **{name: partial(_parent, index=index) for index, name in enumerate(("A", "B", "M3", "M4", "M5", "M6"))},
    "random A": lambda inputs: fresh(inputs.deep, inputs.seed),
    "random B": lambda inputs: fresh(inputs.shallow, inputs.seed),
    "ensemble": lambda inputs: Ensemble(inputs.networks),
    "naive average": _naive,
    "B deepened (Net2Net)": _deepened,
    "B deepened, random": lambda inputs: fresh(_deepened(inputs), inputs.seed),
    "OTFusion of the A alone": lambda inputs: otfusion(replace(inputs, networks=inputs.networks[::2])),
    "CLAFusion, add": partial(fused, settings=REFERENCE),
    "CLAFusion, merge": partial(fused, settings=REFERENCE, depth=1),
    "CLA+OT, ours": partial(fused, settings=AVERAGED),
    "fuse": partial(fused, settings=REFIT),
}
TRANSFERS: dict[str, Method] = {
    "HMT": partial(_transferred, by="chain"),
    "HMT + naive average": lambda inputs: naive_average([inputs.deep, _transferred(inputs, "chain")]),
    "HMT + OTFusion": partial(_into_transferred, by="chain", settings=REFERENCE),
    "HMT + CLA + OTFusion": partial(_into_transferred, by="cla", settings=REFERENCE),
    "HMT + CLA + fuse": partial(_into_transferred, by="cla", settings=REFIT),
}


def _by_map(inputs: Inputs, chosen: Callable[[Inputs], tuple[int, ...]]) -> nn.Module:
    return fused(inputs, replace(REFERENCE, map=chosen(inputs)))


def first_two(inputs: Inputs, first: int, second: int) -> tuple[int, ...]:
    """Return a map from B's layers to A's (VGGs): the first two to `first` and `second` (from 1), the others to A's last."""
    many, few = (len(wire(network, inputs.probe[:1]).units) for network in (inputs.deep, inputs.shallow))
    return first - 1, second - 1, *range(many - few + 2, many)


def same_index(inputs: Inputs) -> tuple[int, ...]:
    """Return a map from B's blocks to A's: the k-th block of each stage to the k-th of the same stage."""
    return tuple(index for ours, theirs in _stages(inputs) for index in ours[: len(theirs)])


def drawn(inputs: Inputs, number: int) -> tuple[int, ...]:
    """Return random map `number` from B's blocks to A's: in each stage first to first, the others in increasing order."""
    generator, chosen = torch_generator(inputs.seed, "map", str(number)), []
    for ours, theirs in _stages(inputs):
        rest = torch.randperm(len(ours) - 1, generator=generator)[: len(theirs) - 1].sort().values
        chosen += [ours[0], *(ours[1 + int(index)] for index in rest)]
    return tuple(chosen)


def _stages(inputs: Inputs) -> list[tuple[list[int], list[int]]]:
    """Return the indices of the blocks (or layers) of each group, in A and in B."""
    groups: list[dict[int, list[int]]] = [{}, {}]
    for indices, network in zip(groups, inputs.networks, strict=False):
        for index, unit in enumerate(wire(network, inputs.probe[:1]).units):
            indices.setdefault(unit.group, []).append(index)
    return list(zip(*(indices.values() for indices in groups), strict=True))


DRAWS = 5
VGG_MAPS = ((1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4))
MAPS: dict[str, Method] = {
    **{
        f"{first}-{second}": partial(_by_map, chosen=partial(first_two, first=first, second=second))
        for first, second in VGG_MAPS
    },
    "same index": partial(_by_map, chosen=same_index),
    **{f"random {number}": partial(_by_map, chosen=partial(drawn, number=number)) for number in range(DRAWS)},
    "CLA, last not pinned": partial(fused, settings=replace(REFERENCE, pin_last=False)),
}
METHODS: Mapping[str, Method] = {**STARTS, **TRANSFERS, **MAPS}
