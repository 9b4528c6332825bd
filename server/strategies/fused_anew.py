"""Fusion without a common basis: align, transport and fuse all networks, every few rounds, into each architecture.

Source: *On Cross-Layer Alignment for Model Fusion of Heterogeneous Neural Networks* (CLA+OT); one fusion is Alg. 2.
`strategy.fusion=cla_ot` compares layers by CKA on a probe set and brings all networks to one depth (by adding or merging
layers). Then exact optimal transport aligns their channels, and the networks are averaged. `refit` is ours (`fusion.fuse`
with its default settings).
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
from fedloom.server.strategies.by_architecture import ByArchitecture, averaged, cast, counted, has, network_key
from fedloom.server.strategies.own_start import Apart, answering, check_fusing, fused_apart
from fedloom.server.strategies.public import PublicImages
from fedloom.server.strategies.server_training import ServerTraining

OWN = "own"
PARTS, CLA_OT, REFIT = "parts", "cla_ot", "refit"
SETTINGS = {CLA_OT: FusionSettings(keep_added=False, refit="none", repair=False), REFIT: FusionSettings()}
ACTIVATIONS, LACKING = "activations", 0.3  # defaults of options
PROBE, SERVER = "strategy.probe", "strategy.server.images"


class FusionOptions(Protocol):
    """The options and methods of `ClaOt` that `FusedAnew` uses; `ClaOt` documents each of them."""

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
    """`cla_ot` for networks whose channels do not correspond. `options` is the configured strategy."""

    options: FusionOptions

    @property
    def reference_name(self) -> str:
        return self.options.reference

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        fusion = self.options.fusion
        for key, usual in (("maps", {}), ("recalibrate", False), ("lacking", LACKING)):
            if getattr(self.options, key) != usual:
                raise UserError(f"strategy.{key}: works only with strategy.fusion={PARTS}, not '{fusion}'; leave it out")
        if fusion != CLA_OT and self.options.basis != ACTIVATIONS:
            raise UserError(f"strategy.basis: works only with strategy.fusion={CLA_OT}, not '{fusion}'; leave it out")
        if not self.options.probe.samples:
            raise UserError(f"{PROBE}.samples: got 0, but strategy.fusion={fusion} needs images; take 2 or more")
        reference_of(experiment, self.options.reference)
        self.options.probe.check(experiment, PROBE)
        self.options.server.check(experiment, SERVER)
        for group in groups_of(experiment):
            try:
                check_fusing(group, groups_of(experiment), self.settings(experiment.task), f"strategy.fusion={fusion}")
            except UserError as error:
                raise UserError(
                    f"{error}; or set strategy.fusion={PARTS} if each network is a part of the deepest one"
                ) from None

    def settings(self, task: str) -> FusionSettings:
        """Return the settings that `strategy.fusion` selects, for targets of this task."""
        settings = answering(task, SETTINGS[self.options.fusion])
        return replace(settings, basis=self.options.basis) if self.options.fusion == CLA_OT else settings

    def round(self, context: RoundContext) -> None:
        self.options.round(context)

    def initial_states(self, context: View) -> Mapping[str, State]:
        if self.options.start == OWN:
            return {group.name: context.initial(site=group.site) for group in groups_of(context.experiment)}
        reference = self.options.first_reference(context)
        return {name: part.taken(reference) for name, part in self.options.parts(context.experiment).items()}

    def combined(self, view: View) -> Mapping[str, State]:
        """Return each architecture's next network.

        It is the fused network, mixed with the architecture's own mean, and trained further. Between fusions it is the mean
        alone.
        """
        last = counted(view)
        if not any(has(last, site) for site in last.sites):
            return self.initial_states(view)  # no remaining site has contributed
        means = {mean.group.name: mean.state for mean in averaged(self._in_basis(last))}
        mix = 1.0 if self._apart(last) else self.options.mix(view)
        return self.options.server.trained(view, self._mixed(last, means, mix) if mix else means, SERVER)

    def _mixed(self, view: View, means: Mapping[str, State], mix: float) -> dict[str, State]:
        probe, states = self.options.probe.read(view, PROBE), {}
        for group in groups_of(view.experiment):
            before = means.get(group.name) or view.initial(site=group.site)  # only its shapes count
            state = fused_apart(group.architecture, self._networks(view), before, probe, self.settings(view.experiment.task))
            if self.options.fusion == REFIT and HEAD[0] in state:
                state |= with_norm(state, float(view.initial(site=group.site)[HEAD[0]].norm()))
            own = means.get(group.name)
            states[group.name] = state if own is None or mix == 1.0 else mixed(state, own, mix)
        return states

    def _networks(self, view: View) -> Iterator[Apart]:
        """Yield the means of architectures, then each network that a site trained apart."""
        for mean in averaged(self._in_basis(view)):
            yield Apart(mean.group.architecture, mean.state, mean.weight)
        yield from networks_of_sites(view.subset(self._apart(view)))

    def _apart(self, view: View) -> list[str]:
        """Return the names of sites whose last network has its own start."""
        return [site.name for site in view.sites if view.last_put(site.name) == 1] if self.options.start == OWN else []

    def _in_basis(self, view: View) -> View:
        apart = self._apart(view)
        return view.subset([site.name for site in view.sites if site.name not in apart])


def networks_of_sites(view: View) -> Iterator[Apart]:
    """Yield the network that each site of the view sent last."""
    groups = group_by_site(view.experiment)
    for site in view.sites:
        group = groups[site.name]
        if has(view, site):
            state = cast(view.contribution(group.name, site.name), view.server_state(network_key(group.name)))
            yield Apart(group.architecture, state, float(view.slots.weight(group.name, site.name)))


def with_norm(state: State, norm: float) -> State:
    """Return the head's tensors, scaled so that its weight has this norm. Sites can train from it; predictions stay."""
    share = norm / max(float(state[HEAD[0]].norm()), 1e-12)
    return {name: state[name] * share for name in HEAD if name in state}


def mixed(fused: State, own: State, share: float) -> State:
    """Return share * fused + (1 - share) * own, with the types of `fused`."""
    total = {name: share * tensor.double() + (1.0 - share) * own[name].double() for name, tensor in fused.items()}
    return cast(total, fused)
