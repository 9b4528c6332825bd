"""Methods that treat all architectures as parts of one network, the reference.

Each entry of the reference is shared by the architectures that hold it.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.typed import option
from fedloom.fusion.state import State, moved_back
from fedloom.fusion.submodels import Held, Submodel, mean_over_holders, submodel
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.view import View
from fedloom.server.strategies.architectures import Group, groups_of, reference_of, wiring_of
from fedloom.server.strategies.by_architecture import ByArchitecture, averaged, network_key

REFERENCE = "reference"  # the saved network that contains all others


@dataclass(frozen=True)
class InParts(ByArchitecture):
    """A method that averages each entry of the reference over the networks that hold it. Each network is a part of it."""

    reference: str = option("", "the architecture that contains all others; empty: the deepest")
    maps: dict[str, Any] = option(
        {},
        "by architecture: the reference's layer (or block) for each of its layers, by index from 0; default: spread evenly",
    )

    fresh: ClassVar[bool] = False  # whether only networks of the last round count, even if all sites are asked

    @property
    def reference_name(self) -> str:
        return self.reference

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        groups = [group.name for group in groups_of(experiment)]
        for name in self.maps:
            if name not in groups:
                raise unknown("architecture of strategy.maps", name, groups)
        large = reference_of(experiment, self.reference)
        for group in groups_of(experiment):
            try:
                _part(large, group, self._map(group.name), 0)
            except UserError as error:
                where = f"strategy.reference, which must contain all networks, is {large.name}, of {large.site.name}"
                cure = f"; {self.cure()}" if self.cure() else ""
                raise UserError(f"{error} ({where}; {group.name} is the network of {group.site.name}){cure}") from None

    def cure(self) -> str:
        """Return what users can do with networks that are not parts of the reference; empty if nothing."""
        return ""

    def parts(self, experiment: Experiment, turn: int = 0) -> dict[str, Submodel]:
        """Return the entries of the reference that each architecture holds, by name. `turn` shifts channels (FedRolex)."""
        large = reference_of(experiment, self.reference)
        return {group.name: _part(large, group, self._map(group.name), turn) for group in groups_of(experiment)}

    def turn(self, number: int) -> int:
        """Return the number of channels by which parts are shifted in round `number`."""
        return 0

    def initial_states(self, context: RoundContext) -> Mapping[str, State]:
        context.save_server_state(REFERENCE, state := self.first_reference(context))
        return {name: part.taken(state) for name, part in self.parts(context.experiment, self.turn(1)).items()}

    def first_reference(self, view: View) -> State:
        """Return the reference's first state, from which parts are taken."""
        return view.initial(site=reference_of(view.experiment, self.reference).site)

    def round(self, context: RoundContext) -> None:
        self.move_back(context)
        super().round(context)

    def no_restoration(self, experiment: Experiment) -> str:
        return ""

    def move_back(self, context: RoundContext) -> None:
        """At the start of a restoration, move the reference, and so all its parts, back to its first state."""
        if not context.restoration or not context.restoration.back:
            return
        reference = moved_back(context.server_state(REFERENCE), self.first_reference(context), context.restoration.back)
        context.save_server_state(REFERENCE, reference)
        for name, part in self.parts(context.experiment, self.turn(context.number)).items():
            context.save_server_state(network_key(name), part.taken(reference))

    def heads_share_basis(self, view: View) -> bool:
        return True

    def recompute_derived(self, context: RoundContext) -> None:
        reference = self._reference(context)
        context.save_server_state(REFERENCE, reference)
        for name, state in self.taken(context, reference).items():
            context.save_server_state(network_key(name), state)

    def combined(self, view: View) -> Mapping[str, State]:
        return self.taken(view, self._reference(view))

    def _reference(self, view: View) -> State:
        """Return the reference, or its initial state if no remaining site has contributed."""
        trained = any(view.total(group.name).addends for group in groups_of(view.experiment))
        return self.fused(view) if trained else self.first_reference(view)

    def before(self, view: View) -> State:
        """Return the state from which the reference takes the entries that no site holds in a round.

        Such entries do not change. But those that only architectures without remaining sites hold become initial again.
        """
        parts, reference = self.parts(view.experiment, self.turn(max(1, number_of(view)))), view.server_state(REFERENCE)
        left = [group.name for group in groups_of(view.experiment) if view.total(group.name).addends]
        if len(left) == len(parts):
            return reference
        return mean_over_holders(
            [Held(parts[name], parts[name].taken(reference), 1.0) for name in left], self.first_reference(view)
        )

    def fused(self, view: View) -> State:
        """Return the new reference: each entry's mean over the networks that hold it."""
        return mean_over_holders(self.held(view), self.before(view))

    def held(self, view: View, lacking: float = 0.0) -> Sequence[Held]:
        """Return each architecture's mean network with its place in the reference.

        `lacking` is the weight of a missing layer, which counts as one that changes nothing.
        """
        parts = self.parts(view.experiment, self.turn(max(1, number_of(view))))
        return [Held(parts[mean.group.name], mean.state, mean.weight, lacking) for mean in averaged(view, self.fresh)]

    def taken(self, view: View, whole: State) -> Mapping[str, State]:
        """Return each architecture's network, a part of the reference `whole`, by its name."""
        parts = self.parts(view.experiment, self.turn(number_of(view) + 1))
        return {name: part.taken(whole) for name, part in parts.items()}

    def _map(self, name: str) -> tuple[int, ...] | None:
        indices = self.maps.get(name)
        if name in self.maps and not (isinstance(indices, list) and all(type(index) is int for index in indices)):
            raise UserError(f"strategy.maps.{name}: got {indices!r}, takes a list of indices such as [0, 2, 3]")
        return None if indices is None else tuple(indices)


def number_of(view: View) -> int:
    """Return the number of the current round, or between rounds of the last one."""
    return view.number if isinstance(view, RoundContext) else view.round


@functools.lru_cache(maxsize=256)
def _part(large: Group, small: Group, places: tuple[int, ...] | None, turn: int) -> Submodel:
    """Return an architecture as a part of the reference.

    Raises:
        UserError: It is not a part of it. The message names both.
    """
    wirings = wiring_of(large.architecture), wiring_of(small.architecture)
    if places is not None:
        few, many = len(wirings[1].units), len(wirings[0].units)
        rising = len(places) == few and all(a < b for a, b in zip(places, (*places[1:], many), strict=True))
        if not rising or (places and places[0] < 0):
            raise UserError(f"strategy.maps.{small.name}: {list(places)} does not map its {few} layers to the {many} of "
                            f"{large.name}; takes {few} rising indices from 0")  # fmt: skip
    matches = None if places is None else dict(enumerate(places))
    return submodel(*wirings, matches=matches, turn=turn, names=(large.name, small.name))
