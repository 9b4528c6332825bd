"""The architectures of a run. Sites with one architecture are a group, whose networks can be averaged directly."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedloom.clients.networks import Architecture, initialise
from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.sites import Site
from fedloom.fusion.graph.channels import Wiring, wire

MOST_EXPERIMENTS = 16  # cached experiments


@dataclass(frozen=True)
class Group:
    """The sites with one architecture. `name` is the architecture's name in slots and tables, `sites` holds site names."""

    name: str
    architecture: Architecture
    sites: frozenset[str]
    site: Site  # one of them


@functools.lru_cache(maxsize=MOST_EXPERIMENTS)
def groups_of(experiment: Experiment) -> tuple[Group, ...]:
    """Return the run's sites grouped by architecture, in the roster's order."""
    sites: dict[Architecture, list[Site]] = {}
    for site in experiment.sites:
        sites.setdefault(experiment.architecture(site), []).append(site)
    names = _names(list(sites))
    return tuple(Group(name, architecture, frozenset(site.name for site in members), members[0])
                 for name, (architecture, members) in zip(names, sites.items(), strict=True))  # fmt: skip


@functools.lru_cache(maxsize=MOST_EXPERIMENTS)
def group_by_site(experiment: Experiment) -> dict[str, Group]:
    """Return the group of each site, by the site's name."""
    return {site: group for group in groups_of(experiment) for site in group.sites}


def reference_of(experiment: Experiment, name: str = "") -> Group:
    """Return the reference: the group `name` or, without a name, the group with most layers, then most parameters.

    Raises:
        UserError: No architecture has this name.
    """
    groups = {group.name: group for group in groups_of(experiment)}
    if name and name not in groups:
        raise unknown("architecture", name, groups)
    return groups[name] if name else max(groups.values(), key=lambda group: size_of(group.architecture))


def size_of(architecture: Architecture) -> tuple[int, int]:
    """Return a network's numbers of layers (or residual blocks) and of parameters."""
    wiring = wiring_of(architecture)
    return len(wiring.units), sum(weight.numel() for weight in wiring.graph.parameters())


@functools.lru_cache(maxsize=64)
def wiring_of(architecture: Architecture) -> Wiring:
    """Return how layers and channels of a network with this architecture are connected.

    Raises:
        UserError: The network cannot be traced. The message names it.
    """
    network = architecture.build().eval()
    initialise(network, torch.Generator().manual_seed(0))
    try:
        return wire(network, architecture.form.zeros(1))
    except UserError as error:
        raise UserError(f"network '{architecture.options['name']}': {error}") from None


def _names(architectures: Sequence[Architecture]) -> list[str]:
    """Return short names: the network's name and, where several share it, the options in which they differ."""
    names = []
    for one in architectures:
        name = str(one.options["name"])
        same = [other.options for other in architectures if other.options["name"] == name]
        differs = [value for key, value in sorted(one.options.items()) if any(other.get(key) != value for other in same)]
        words = [
            name.rpartition(":")[2],
            *map(str, differs),
            *([str(one.outputs)] if _share_network(one, architectures) else []),
        ]
        names.append(re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(words)).strip("-")[:60])
    earlier = [names[:index].count(name) for index, name in enumerate(names)]
    return [name if names.count(name) == 1 else f"{name}-{before + 1}" for name, before in zip(names, earlier, strict=True)]


def _share_network(one: Architecture, others: Sequence[Architecture]) -> bool:
    return sum(other.network == one.network for other in others) > 1
