"""The classes that sites have in common, by the names that they report when they enrol. No data is compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError
from fedloom.conf.sites import Site
from fedloom.fusion.state import State

NAMES = "classes"  # the saved state: the common classes' names, as code points


@dataclass(frozen=True)
class SiteClasses:
    """The class of each output of each site's network.

    Attributes:
        names: By site, the class names of outputs 0, 1, ...; None for a class without images at the site.
    """

    names: Mapping[str, Sequence[str | None]]

    @staticmethod
    def from_reports(
        experiment: Experiment,
        sites: Sequence[Site],
        reported: Mapping[str, Sequence[str]],
        synonyms: Sequence[Sequence[str]],
    ) -> "SiteClasses":
        """Return the class names of these sites, from the names that they report.

        Args:
            experiment: The experiment.
            sites: The sites.
            reported: By site, the reported names of its classes 0, 1, .... A class without a name is named by its number.
            synonyms: Groups of names; all names in a group mean the same class.

        Returns:
            The class names by site. All names in a group become its first name.
        """
        one_name = {name: group[0] for group in synonyms for name in group}
        return SiteClasses(
            {site.name: _named(experiment, site, reported[site.name], one_name) for site in sites if site.name in reported}
        )

    def common(self) -> list[str]:
        """Return the class names that all sites have, in the first site's order."""
        each = list(self.names.values())
        if not each:
            return []
        everywhere = set.intersection(*(set(names) for names in each)) - {None}
        return [name for name in dict.fromkeys(each[0]) if name is not None and name in everywhere]

    def places(self, site: str, known: Sequence[str]) -> torch.Tensor:
        """Return where the classes of a site's outputs are in a list of class names.

        Args:
            site: The site's name.
            known: The class names.

        Returns:
            int64 [outputs]: for each output, its class's index in `known`; -1 if it is not there.
        """
        return torch.tensor([known.index(name) if name in known else -1 for name in self.names[site]])

    def all(self) -> list[str]:
        """Return the class names of all sites, each once."""
        return list(dict.fromkeys(name for names in self.names.values() for name in names if name is not None))


def _named(experiment: Experiment, site: Site, reported: Sequence[str], one_name: Mapping[str, str]) -> list[str | None]:
    spec, outputs = site.spec, experiment.architecture(site).outputs
    has = sorted(set(spec.classes)) if spec.classes else list(range(outputs))
    if spec.classes and spec.relabel:
        names: list[str | None] = [reported[k] if k < len(reported) else str(has[k]) for k in range(len(has))]
    else:
        names = [(reported[k] if k < len(reported) else str(k)) if k in has else None for k in range(outputs)]
    names += [None] * (outputs - len(names))
    return [one_name.get(name, name) if name is not None else None for name in names]


def encoded(names: Sequence[str]) -> State:
    """Return class names as tensors, as saved states hold only tensors."""
    return {f"{index:05d}": torch.tensor([ord(letter) for letter in name]) for index, name in enumerate(names)}


def decoded(state: State) -> list[str]:
    """Return the class names that `encoded` stored."""
    return ["".join(chr(code) for code in state[key].tolist()) for key in sorted(state)]


def check_alike(alike: Sequence[object]) -> None:
    """Raise UserError unless each group of `strategy.alike` is a list of at least two names, and no name occurs twice."""
    seen: set[str] = set()
    for index, group in enumerate(alike):
        where = f"strategy.alike[{index}]"
        if not isinstance(group, list) or len(group) < 2 or not all(isinstance(name, str) for name in group):
            raise UserError(
                f"{where}: got {group!r}, takes a list of at least two names of classes, such as [car, automobile]"
            )
        if twice := next((name for name in group if name in seen), None):
            raise UserError(f"{where}: '{twice}' is named twice")
        seen |= set(group)
