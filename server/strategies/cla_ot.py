"""Fusion of different networks at the server (CLA+OT), round after round: all architectures are kept in one basis.

After *On Cross-Layer Alignment for Model Fusion of Heterogeneous Neural Networks* (CLA+OT): layers of networks of different
depth are aligned, depths balanced by layers that leave the function as it is, and the networks averaged. There this is done
once, with networks trained apart; here sites start from parts of one network, so that layers and channels correspond from
the first round on and no plan has to be found: a round is the mean of the balanced networks.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clients.objectives import objective_of
from clients.objectives.heterogeneous import ALONE, EXCLUSIVE
from conf.errors import UserError, unknown
from conf.schema import Config
from conf.typed import value
from fusion.exact import State
from fusion.submodels import Held, Submodel, mean_over_holders, submodel
from server.rounds.run import Run
from server.rounds.view import View
from server.strategies.architectures import Group, groups_of, reference_of, wiring_of
from server.strategies.base import STRATEGIES, Strategy
from server.strategies.by_architecture import ByArchitecture, averaged, cast, kept
from server.strategies.exclusive import Alone, Exclusive

REFERENCE = "reference"  # what is kept: the network in which all others lie
BASELINES: dict[str, type[Strategy]] = {EXCLUSIVE: Exclusive, ALONE: Alone}


@STRATEGIES.register("cla_ot")
@dataclass(frozen=True)
class ClaOt(ByArchitecture):
    """Options of the server's side; the objective is `heterogeneous`."""

    reference: str = value("", "the architecture that all others are parts of; empty: the deepest")
    maps: dict[str, Any] = value(
        {}, "an architecture's name: for each of its layers (or blocks) the place of the reference's, from 0; else even"
    )
    lacking: float = value(
        0.3, "weight with which a layer that a network lacks counts as one that changes nothing", low=0.0, high=1.0
    )
    server_mix: float = value(
        1.0, "share of the fused network in what an architecture goes on from; the rest is its own mean", low=0.0, high=1.0
    )

    @property
    def reference_name(self) -> str:
        return self.reference

    def at_work(self, config: Config) -> Strategy:
        """Its baselines bring no architectures together."""
        mode = objective_of(config).mode
        return BASELINES[mode]() if mode in BASELINES else self

    def check(self, config: Config) -> None:
        """UserError for networks that are no parts of the reference, and for maps that are none."""
        super().check(config)
        groups = [group.name for group in groups_of(config)]
        for name in self.maps:
            if name not in groups:
                raise unknown("architecture of strategy.maps", name, groups)
        self._submodels(config)

    def start(self, run: Run) -> Mapping[str, State]:
        """Parts of the reference's first network, in which layers that not all have leave the function as it is."""
        reference, parts = self._parts(run)
        state = run.initial(site=reference.site)
        for part in parts.values():
            state |= {name: tensor.clone() for name, tensor in part.neutral.items()}
        run.keep(REFERENCE, state)
        return {name: part.taken(state) for name, part in parts.items()}

    def settle(self, run: Run) -> None:
        """Fuse, and keep the reference and what every architecture goes on from."""
        found = self.combined(run)
        run.keep(REFERENCE, self.fused(run))
        for name, state in found.items():
            run.keep(kept(name), state)

    def fused(self, view: View) -> State:
        """The reference as the mean over all architectures, balanced, weighted by images."""
        _, parts = self._parts(view)
        held = [Held(parts[one.group.name], one.state, one.weight, self.lacking) for one in averaged(view)]
        return mean_over_holders(held, view.kept(REFERENCE))

    def combined(self, view: View) -> Mapping[str, State]:
        """Every architecture's part of the fused network, mixed with its own mean."""
        _, parts = self._parts(view)
        whole, means = self.fused(view), {one.group.name: one.state for one in averaged(view)}
        return {name: self._mixed(part.taken(whole), means.get(name)) for name, part in parts.items()}

    def _mixed(self, fused: State, own: State | None) -> State:
        if own is None or self.server_mix == 1.0:
            return fused
        mixed = {name: self.server_mix * tensor.double() + (1.0 - self.server_mix) * own[name].double()
                 for name, tensor in fused.items()}  # fmt: skip
        return cast(mixed, fused)

    def _parts(self, view: View) -> tuple[Group, Mapping[str, Submodel]]:
        return reference_of(view.config, self.reference), self._submodels(view.config)

    def _submodels(self, config: Config) -> dict[str, Submodel]:
        large = reference_of(config, self.reference)
        return {group.name: _part(large, group, self._map(group.name)) for group in groups_of(config)}

    def _map(self, name: str) -> tuple[int, ...] | None:
        places = self.maps.get(name)
        if places is not None and not (isinstance(places, list) and all(type(place) is int for place in places)):
            raise UserError(f"strategy.maps.{name}: got {places!r}, takes a list of places such as [0, 2, 3]")
        return None if places is None else tuple(places)


@functools.lru_cache(maxsize=256)
def _part(large: Group, small: Group, places: tuple[int, ...] | None) -> Submodel:
    """An architecture as a part of the reference. UserError naming both where it is none."""
    wirings = wiring_of(large.architecture), wiring_of(small.architecture)
    if places is not None:
        few, many = len(wirings[1].units), len(wirings[0].units)
        rising = len(places) == few and all(a < b for a, b in zip(places, (*places[1:], many), strict=True))
        if not rising or (places and places[0] < 0):
            raise UserError(f"strategy.maps.{small.name}: {list(places)} is no map of its {few} layers into the {many} of "
                            f"{large.name}; takes {few} rising places from 0")  # fmt: skip
    matches = None if places is None else dict(enumerate(places))
    return submodel(*wirings, matches=matches, names=(large.name, small.name))
