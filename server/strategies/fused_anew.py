"""Networks of all architectures are aligned, transported and fused anew, every so many rounds, into each architecture.

After *On Cross-Layer Alignment for Model Fusion of Heterogeneous Neural Networks* (CLA+OT), of which one fusion is Alg. 2:
`strategy.fusion=cla_ot` compares layers by CKA on a probe set, gives all networks one depth (layers are added or merged),
brings their channels into one basis by exact optimal transport, and averages. `refit` is ours (`fusion.fuse`, its default).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError
from fedloom.fusion.settings import FusionSettings
from fedloom.fusion.state import State
from fedloom.fusion.submodels import Submodel
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.recalibration import HEAD
from fedloom.server.rounds.view import View
from fedloom.server.strategies.architectures import group_by_site, groups_of, reference_of
from fedloom.server.strategies.by_architecture import ByArchitecture, averaged, cast, counted, has, kept
from fedloom.server.strategies.own_start import Apart, check_fusing, fused_apart
from fedloom.server.strategies.public import PublicImages
from fedloom.server.strategies.server_training import ServerTraining

OWN = "own"
PARTS, CLA_OT, REFIT = "parts", "cla_ot", "refit"
SETTINGS = {CLA_OT: FusionSettings(keep_added=False, refit="none", repair=False), REFIT: FusionSettings()}
ACTIVATIONS, LACKING = "activations", 0.3  # as the options are by default
PROBE, SERVER = "strategy.probe", "strategy.server.images"


class FusionOptions(Protocol):
    """Of the options of `cla_ot`, and of what follows from them, what a fusion without a common basis needs."""

    @property
    def reference(self) -> str: ...
    @property
    def fusion(self) -> str: ...
    @property
    def basis(self) -> str: ...
    @property
    def start(self) -> str: ...
    @property
    def probe(self) -> PublicImages: ...
    @property
    def server(self) -> ServerTraining: ...
    def round(self, context: RoundContext) -> None: ...
    def first_reference(self, view: View) -> State: ...
    def parts(self, experiment: Experiment) -> Mapping[str, Submodel]: ...
    def mix(self, view: View) -> float: ...


@dataclass(frozen=True)
class FusedAnew(ByArchitecture):
    """`cla_ot` with a fusion that needs no common basis; `options`: the strategy's."""

    options: FusionOptions

    @property
    def reference_name(self) -> str:
        return self.options.reference

    def check(self, experiment: Experiment) -> None:
        """UserError for networks that cannot be fused into each other, and for a server without images."""
        super().check(experiment)
        fusion = self.options.fusion
        for key, usual in (("maps", {}), ("recalibrate", False), ("lacking", LACKING)):
            if getattr(self.options, key) != usual:
                raise UserError(f"strategy.{key}: needs strategy.fusion={PARTS}, got '{fusion}'; leave it out")
        if fusion != CLA_OT and self.options.basis != ACTIVATIONS:
            raise UserError(f"strategy.basis: needs strategy.fusion={CLA_OT}, got '{fusion}'; leave it out")
        if not self.options.probe.samples:
            raise UserError(f"{PROBE}.samples: got 0, and strategy.fusion={fusion} looks at images; takes 2 or more")
        reference_of(experiment, self.options.reference)
        self.options.probe.check(experiment, PROBE)
        self.options.server.check(experiment, SERVER)
        for group in groups_of(experiment):
            try:
                check_fusing(group, groups_of(experiment), self.settings, f"strategy.fusion={fusion}")
            except UserError as error:
                raise UserError(
                    f"{error}; or set strategy.fusion={PARTS}, if each network is a part of the deepest"
                ) from None

    @property
    def settings(self) -> FusionSettings:
        """Of each fusion."""
        found = SETTINGS[self.options.fusion]
        return replace(found, basis=self.options.basis) if self.options.fusion == CLA_OT else found

    def round(self, context: RoundContext) -> None:
        """As all; sites with networks of their own get no network in the first one."""
        self.options.round(context)

    def initial_states(self, context: RoundContext) -> Mapping[str, State]:
        """Each architecture's own, or parts of one network."""
        return self._starts(context)

    def _starts(self, view: View) -> dict[str, State]:
        if self.options.start == OWN:
            return {group.name: view.initial(site=group.site) for group in groups_of(view.experiment)}
        whole = self.options.first_reference(view)
        return {name: part.taken(whole) for name, part in self.options.parts(view.experiment).items()}

    def combined(self, view: View) -> Mapping[str, State]:
        """Every architecture's fused network, mixed with its own mean and trained further; between fusions its own mean."""
        last = counted(view)
        if not any(has(last, site) for site in last.sites):
            return self._starts(view)  # no site is left that has given anything
        means = {one.group.name: one.state for one in averaged(self._in_basis(last))}
        mix = 1.0 if self._apart(last) else self.options.mix(view)
        return self.options.server.trained(view, self._mixed(last, means, mix) if mix else means, SERVER)

    def _mixed(self, view: View, means: Mapping[str, State], mix: float) -> dict[str, State]:
        probe, found = self.options.probe.read(view, PROBE), {}
        for group in groups_of(view.experiment):
            before = means.get(group.name) or view.initial(site=group.site)  # of which the shape alone counts
            state = fused_apart(group.architecture, self._networks(view), before, probe, self.settings)
            if self.options.fusion == REFIT and HEAD[0] in state:
                state |= with_norm(state, float(view.initial(site=group.site)[HEAD[0]].norm()))
            own = means.get(group.name)
            found[group.name] = state if own is None or mix == 1.0 else mixed(state, own, mix)
        return found

    def _networks(self, view: View) -> Iterator[Apart]:
        """The means of architectures, and after them each network that a site has trained apart."""
        for one in averaged(self._in_basis(view)):
            yield Apart(one.group.architecture, one.state, one.weight)
        yield from networks_of_sites(view.subset(self._apart(view)))

    def _apart(self, view: View) -> list[str]:
        """The sites whose last network is one that they started themselves."""
        return [site.name for site in view.sites if view.last_put(site.name) == 1] if self.options.start == OWN else []

    def _in_basis(self, view: View) -> View:
        apart = self._apart(view)
        return view.subset([site.name for site in view.sites if site.name not in apart])


def networks_of_sites(view: View) -> Iterator[Apart]:
    """The sites' own networks, one after the other."""
    groups = group_by_site(view.experiment)
    for site in view.sites:
        group = groups[site.name]
        if has(view, site):
            state = cast(view.contribution(group.name, site.name), view.server_state(kept(group.name)))
            yield Apart(group.architecture, state, float(view.slots.weight(group.name, site.name)))


def with_norm(state: State, norm: float) -> State:
    """The head's parameters, with a weight of that norm, from which sites can train. The answers stay."""
    share = norm / max(float(state[HEAD[0]].norm()), 1e-12)
    return {name: state[name] * share for name in HEAD if name in state}


def mixed(fused: State, own: State, share: float) -> State:
    """share * fused + (1 - share) * own, with the types of `fused`."""
    total = {name: share * tensor.double() + (1.0 - share) * own[name].double() for name, tensor in fused.items()}
    return cast(total, fused)
