"""Fusion of different networks at the server, round after round: the mean of all, as parts of one network.

`fusion: parts`, the default, is ours. Sites start from parts of one network, so layers and channels correspond from the
first round. A round is the mean of the balanced networks, without alignment or transport.

`fusion: cla_ot` is the paper's method (*On Cross-Layer Alignment for Model Fusion of Heterogeneous Neural Networks*), for
networks that were trained apart or drift apart: see `fused_anew.py`.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.typed import option
from fedloom.fusion.discriminant import scaled
from fedloom.fusion.state import State
from fedloom.fusion.submodels import mean_over_holders
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.recalibration import HEAD, ask, check_head
from fedloom.server.rounds.view import View
from fedloom.server.strategies.architectures import Group, groups_of, reference_of
from fedloom.server.strategies.base import STRATEGIES, Strategy
from fedloom.server.strategies.by_architecture import averaged, cast, network_key
from fedloom.server.strategies.exclusive import ask_alone
from fedloom.server.strategies.fused_anew import (
    ACTIVATIONS,
    CLA_OT,
    LACKING,
    OWN,
    PARTS,
    PROBE,
    REFIT,
    SERVER,
    FusedAnew,
    mixed,
    networks_of_sites,
)
from fedloom.server.strategies.in_parts import InParts, number_of
from fedloom.server.strategies.own_start import Apart, check_fusing, fused_apart, part_of, settings_for
from fedloom.server.strategies.public import PublicImages
from fedloom.server.strategies.server_training import ServerTraining

SHARED = "shared"
UNSEEN = 10.0  # initial logit deficit, in nats, of a class that no site has


@STRATEGIES.register("cla_ot")
@dataclass(frozen=True)
class ClaOt(InParts):
    """Fusion of networks of different depth and width in every round. Its objective is `heterogeneous`."""

    fusion: str = option(
        PARTS,
        "parts: average all networks as parts of one; cla_ot: align layers, transport, average (the paper's method); "
        "refit: choose channels from all networks and refit layers",
        choices=(PARTS, CLA_OT, REFIT),
    )
    basis: str = option(ACTIVATIONS, "fusion=cla_ot: data for the transport plans", choices=(ACTIVATIONS, "weights"))
    start: str = option(
        SHARED,
        "shared: sites start from parts of one network; own: from their own networks, fused after round 1",
        choices=(SHARED, OWN),
    )
    probe: PublicImages = option(
        PublicImages,
        "start=own, fusion=cla_ot, refit: unlabelled images to compare and fit networks; samples=0 (parts only): none",
    )
    recalibrate: bool = option(
        False, "start=own: after the first fusion, compute heads and BatchNorm's statistics from sums over the sites' images"
    )
    lacking: float = option(
        LACKING,
        "fusion=parts: weight of a missing layer, which counts as a layer that changes nothing",
        low=0.0,
        high=1.0,
    )
    server_mix: float = option(
        1.0, "share of the fused network in an architecture's next network; the rest is its own mean", low=0.0, high=1.0
    )
    every: int = option(
        1, "rounds from one fusion to the next; in between, each architecture continues from its own mean", low=1
    )
    server: ServerTraining = option(ServerTraining, "training at the server after each round")

    def resolve(self, experiment: Experiment) -> Strategy:
        """Return the mode's baseline, if any; `FusedAnew` for fusion=cla_ot or refit; else this strategy."""
        strategy = super().resolve(experiment)
        return FusedAnew(self) if strategy is self and self.fusion != PARTS else strategy

    def check(self, experiment: Experiment) -> None:
        if self.fusion == PARTS or self.start == SHARED:
            super().check(experiment)
        if self.fusion != PARTS:
            FusedAnew(self).check(experiment)
            return
        self.server.check(experiment, SERVER)
        if self.start == OWN:
            if self.probe.samples:
                self.probe.check(experiment, PROBE)
            settings = settings_for(bool(self.probe.samples), experiment.task)
            check_fusing(reference_of(experiment, self.reference), groups_of(experiment), settings, "strategy.start=own")
            self._check_heads(experiment)

    def cure(self) -> str:
        """Return the options that take networks of any widths."""
        fusion = "strategy.fusion=refit and " if self.fusion == PARTS else ""
        return f"for any widths, set {fusion}strategy.start=own"

    def first_reference(self, view: View) -> State:
        """Return the initial reference, in which layers that some architecture lacks have no effect."""
        state = super().first_reference(view)
        for part in self.parts(view.experiment).values():
            state |= {name: tensor.clone() for name, tensor in part.neutral.items()}
        return state

    def no_restoration(self, experiment: Experiment) -> str:
        return "with strategy.start=own, networks have no common first state" if self.start == OWN else ""

    def round(self, context: RoundContext) -> None:
        """Run a round as `ByArchitecture` does. But with start=own, sites receive no network in round 1."""
        if self.start == OWN and context.number == 1:
            ask_alone(context)
        else:
            super().round(context)

    def recompute_derived(self, context: RoundContext) -> None:
        """Recompute and save all networks. With `recalibrate`, correct them after the first fusion, if sites answer."""
        super().recompute_derived(context)
        if self.recalibrate and context.participants and self._first(context):
            first = {group.name: context.initial(site=group.site)[HEAD[0]] for group in groups_of(context.experiment)}
            with contextlib.suppress(FailedError):
                for name, parts in ask(context, self.models(context), self.heads_share_basis(context), UNSEEN).parts.items():
                    context.save_server_state(
                        network_key(name),
                        _recalibrated(context.server_state(network_key(name)), parts, float(first[name].norm())),
                    )

    def heads_share_basis(self, view: View) -> bool:
        """Return False after a fusion without images, and True otherwise."""
        return bool(self.probe.samples) or not self._first(view)

    def fused(self, view: View) -> State:
        """Return the new reference: the mean over networks, weighted by images, or a fusion of networks trained apart."""
        if self.start == SHARED:
            return mean_over_holders(self.held(view, self.lacking), self.before(view))
        if common := [site.name for site in view.sites if view.last_put(site.name) > 1]:
            return mean_over_holders(self.held(view.subset(common), self.lacking), self.before(view))
        reference = reference_of(view.experiment, self.reference).architecture
        settings = settings_for(bool(self.probe.samples), view.experiment.task)
        return fused_apart(reference, networks_of_sites(view), self.before(view), self._probe(view), settings)

    def taken(self, view: View, whole: State) -> Mapping[str, State]:
        """Return each architecture's part of the fused network, mixed with its own mean and trained further."""
        return self.server.trained(view, self._parts(view, whole), SERVER)

    def _parts(self, view: View, whole: State) -> Mapping[str, State]:
        if self._first(view):
            parts, probe, task = self.parts(view.experiment), self._probe(view), view.experiment.task
            weight = float(sum(view.last_samples(site.name) for site in view.sites))
            goal = Apart(reference_of(view.experiment, self.reference).architecture, whole, weight)
            return {group.name: part_of(group, parts[group.name], goal, self._apart(view, group), probe, task)
                    for group in groups_of(view.experiment)}  # fmt: skip
        states, mix = super().taken(view, whole), self.mix(view)
        if mix == 1.0:
            return states
        means = {mean.group.name: mean.state for mean in averaged(view)}
        return {name: mixed(state, means[name], mix) if name in means else state for name, state in states.items()}

    def _apart(self, view: View, group: Group) -> Iterator[Apart]:
        """Yield the networks that the group's sites sent last."""
        return networks_of_sites(view.subset([site.name for site in view.sites if site.name in group.sites]))

    def _check_heads(self, experiment: Experiment) -> None:
        for group in groups_of(experiment) if self.recalibrate else ():
            try:
                check_head(group.name, group.architecture, experiment.task)
            except UserError as error:
                raise UserError(f"strategy.recalibrate: {error}; set it to false") from None

    def mix(self, view: View) -> float:
        """Return the fused network's share after this round: `server_mix`, or 0 between fusions. The last round fuses."""
        return self.server_mix if number_of(view) % self.every == 0 or number_of(view) >= view.config.rounds else 0.0

    def _first(self, view: View) -> bool:
        """Return whether all networks started at their sites and were trained apart."""
        return self.start == OWN and all(view.last_put(site.name) <= 1 for site in view.sites)

    def _probe(self, view: View) -> Tensor | None:
        return self.probe.read(view, PROBE) if self.probe.samples else None


def _recalibrated(before: State, parts: State, norm: float) -> State:
    """Return a network with the tensors in `parts`. The head is scaled to a norm from which sites can train."""
    head = scaled(parts[HEAD[0]], parts[HEAD[1]], norm)
    return cast({**before, **parts, **dict(zip(HEAD, head, strict=True))}, before)
