"""All that CLA+OT is compared with, as one kind of function: from networks and unlabelled images to one network."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from fedloom.clients.networks.base import initialise
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.comparators.baselines import Ensemble, naive_average
from fedloom.fusion.comparators.net2net import deepened
from fedloom.fusion.comparators.transfer import transferred
from fedloom.fusion.graph.channels import Unit, wire
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings

REFERENCE = FusionSettings.reference()  # what the paper's public code does
AVERAGED = FusionSettings(refit="none")  # ours: averaged, one plan for each axis, statistics repaired
REFIT = FusionSettings()  # ours: the channels of all networks selected, layers fitted anew


@dataclass(frozen=True, eq=False)
class Given:
    """Trained networks, A (the deeper) and B by turns; unlabelled training images [k, ...]; a seed for what is drawn."""

    networks: list[nn.Module]
    probe: Tensor
    seed: int

    @property
    def deep(self) -> nn.Module:
        """A."""
        return self.networks[0]

    @property
    def shallow(self) -> nn.Module:
        """B."""
        return self.networks[1]


Method = Callable[[Given], nn.Module]  # raises UserError where there is no such network


def fused(given: Given, settings: FusionSettings, depth: int = 0) -> nn.Module:
    """Both networks in one, of B's widths and the layers of A (`depth` 0) or of B (1); more in the basis of the deepest, A
    (CLA+OT, Sec. 3.3)."""
    into = 1 if len(given.networks) == 2 else 0
    return fuse(given.networks, into=into, depth=depth, probe=given.probe, settings=settings).network


def fresh(network: nn.Module, seed: int) -> nn.Module:
    """The same network, its weights drawn anew."""
    drawn = copy.deepcopy(network)
    initialise(drawn, torch_generator(seed, "another start"))
    return drawn


def _number(place: int) -> Method:
    return lambda given: copy.deepcopy(given.networks[place])


def _naive(given: Given) -> nn.Module:
    even = (network if place % 2 == 0 else _deepened(given, place) for place, network in enumerate(given.networks))
    return naive_average(list(even))


def _deepened(given: Given, place: int = 1) -> nn.Module:
    return deepened(given.networks[place], given.deep, given.probe)


def otfusion(given: Given, settings: FusionSettings = REFERENCE) -> nn.Module:
    """Networks of one depth fused. Raises UserError for others."""
    depths = [len(wire(network, given.probe[:1]).units) for network in given.networks]
    if len(set(depths)) > 1:
        raise UserError(f"OTFusion: networks of {depths} hidden layers or blocks; takes networks of one depth")
    return fused(given, settings)


def _transferred(given: Given, by: str) -> nn.Module:
    return transferred(given.shallow, given.deep, given.probe, by)


def _into_transferred(given: Given, by: str, settings: FusionSettings) -> nn.Module:
    """A and the network that B was transferred into, fused."""
    return otfusion(replace(given, networks=[given.deep, _transferred(given, by)]), settings)


STARTS: dict[str, Method] = {
    **{name: _number(place) for place, name in enumerate(("A", "B", "M3", "M4", "M5", "M6"))},
    "random A": lambda given: fresh(given.deep, given.seed),
    "random B": lambda given: fresh(given.shallow, given.seed),
    "ensemble": lambda given: Ensemble(given.networks),
    "naive average": _naive,
    "B deepened (Net2Net)": _deepened,
    "B deepened, random": lambda given: fresh(_deepened(given), given.seed),
    "OTFusion of the A alone": lambda given: otfusion(replace(given, networks=given.networks[::2])),
    "CLAFusion, add": partial(fused, settings=REFERENCE),
    "CLAFusion, merge": partial(fused, settings=REFERENCE, depth=1),
    "CLA+OT, ours": partial(fused, settings=AVERAGED),
    "fuse": partial(fused, settings=REFIT),
}
TRANSFERS: dict[str, Method] = {
    "HMT": partial(_transferred, by="chain"),
    "HMT + naive average": lambda given: naive_average([given.deep, _transferred(given, "chain")]),
    "HMT + OTFusion": partial(_into_transferred, by="chain", settings=REFERENCE),
    "HMT + CLA + OTFusion": partial(_into_transferred, by="cla", settings=REFERENCE),
    "HMT + CLA + fuse": partial(_into_transferred, by="cla", settings=REFIT),
}


def _by_map(given: Given, chosen: Callable[[Given], tuple[int, ...]], settings: FusionSettings = REFERENCE) -> nn.Module:
    return fused(given, replace(settings, map=chosen(given)))


def first_two(given: Given, one: int, two: int) -> tuple[int, ...]:
    """VGG: a(1), a(2) as they are given (from 1), the other layers of B with the last ones of A."""
    many, few = (len(wire(network, given.probe[:1]).units) for network in (given.deep, given.shallow))
    return one - 1, two - 1, *range(many - few + 2, many)


def same_index(given: Given) -> tuple[int, ...]:
    """The k-th block of each stage of B with the k-th of A."""
    return tuple(place for ours, theirs in _stages(given) for place in ours[: len(theirs)])


def drawn(given: Given, number: int) -> tuple[int, ...]:
    """The first block of each stage with the first, the others with random ones in their order."""
    generator, found = torch_generator(given.seed, "map", str(number)), []
    for ours, theirs in _stages(given):
        rest = torch.randperm(len(ours) - 1, generator=generator)[: len(theirs) - 1].sort().values
        found += [ours[0], *(ours[1 + int(place)] for place in rest)]
    return tuple(found)


def _stages(given: Given) -> list[tuple[list[int], list[int]]]:
    """The places of the blocks (or layers) of each group in A and in B."""
    return list(zip(*(_groups(wire(network, given.probe[:1]).units) for network in given.networks[:2]), strict=True))


def _groups(units: tuple[Unit, ...]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for place, unit in enumerate(units):
        groups.setdefault(unit.group, []).append(place)
    return list(groups.values())


DRAWS = 5
VGG_MAPS = ((1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4))
MAPS: dict[str, Method] = {
    **{f"{one}-{two}": partial(_by_map, chosen=partial(first_two, one=one, two=two)) for one, two in VGG_MAPS},
    "same index": partial(_by_map, chosen=same_index),
    **{f"random {number}": partial(_by_map, chosen=partial(drawn, number=number)) for number in range(DRAWS)},
    "CLA, last not pinned": partial(fused, settings=replace(REFERENCE, pin_last=False)),
}
METHODS: Mapping[str, Method] = {**STARTS, **TRANSFERS, **MAPS}
