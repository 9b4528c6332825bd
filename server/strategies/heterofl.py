"""HeteroFL (Diao et al. 2021): narrow networks are the first channels of the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedloom.clients.networks import Network
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.heterofl import HELD, LABELS, RATES, check_labels
from fedloom.clients.protocol.messages import MEAN, SITE, TRAIN
from fedloom.conf.errors import UserError
from fedloom.conf.sites import Site
from fedloom.fusion.graph.units import MIXING
from fedloom.fusion.state import BATCH_NORM, State
from fedloom.fusion.submodels import Held, Submodel
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import View
from fedloom.server.strategies.architectures import Group, group_by_site, groups_of, reference_of, wiring_of
from fedloom.server.strategies.base import STRATEGIES, check_objective
from fedloom.server.strategies.by_architecture import averaged, counted, kept
from fedloom.server.strategies.in_parts import InParts

HEAD = "head."  # before the names of the last layer's tensors, [outputs, ...]


@STRATEGIES.register("heterofl")
@dataclass(frozen=True)
class HeteroFL(InParts):
    """Every coordinate becomes the mean over the sites that hold it, else stays; a site holds the first channels of each
    layer and of the last layer the rows of its labels (Alg. 1; here weighted by images). The objective is `heterofl`.

    Slots: by architecture the sum of the networks, rows that a site does not hold 0, and that of the rows held.
    """

    default_objective: ClassVar[str] = "heterofl"

    def check(self, experiment: Experiment) -> None:
        """UserError for another objective, and for BatchNorm with running statistics, which HeteroFL does not use."""
        check_objective(experiment, "heterofl")
        super().check(experiment)
        running = experiment.evaluation.statistics == "running"
        if odd := next(
            (one.name for one in groups_of(experiment) if running and _has_statistics(one.architecture.build())), ""
        ):
            told = f"strategy heterofl trains {odd} without running statistics (static BatchNorm)"
            raise UserError(f"evaluation.statistics: got 'running', {told}; takes recomputed or batch")

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """The sites' networks and the rows that they hold, by architecture."""
        rows = {rows_of(group.name): Sum(weighted=True) for group in groups_of(experiment)}
        return {**super().slots(experiment), **rows}

    def round(self, context: RoundContext) -> None:
        """Send every site its part, with rates and labels; put what it makes of it, without rows that it does not hold."""
        groups, rates = group_by_site(context.experiment), self._rates(context.experiment)
        sent, labels = (
            {group.name: context.server_state(kept(group.name)) for group in groups_of(context.experiment)},
            self._labels(context),
        )

        def content(site: Site) -> dict[str, State]:
            group = groups[site.name].name
            return {MEAN: sent[group], RATES: rates[group], LABELS: labels[site.name]}

        asked = [site for site in context.participants if site.name in labels]
        for reply in context.ask(TRAIN, content, lambda site: {SITE: RecordSpec(sent[groups[site.name].name])}, asked):
            group, held = groups[reply.site.name].name, labels[reply.site.name][HELD]
            context.put(group, reply.site, _masked(reply[SITE], held), reply.samples)
            context.put(rows_of(group), reply.site, {HELD: held}, reply.samples)

    def held(self, view: View, lacking: float = 0.0) -> Sequence[Held]:
        """The means of all architectures as parts of the reference, with the shares of the sites that hold each row."""
        parts, those = self.parts(view.experiment), counted(view)
        found = []
        for one in averaged(view):
            share = those.mean(rows_of(one.group.name))[HELD]
            shares = {name: _as_rows(share, tensor) for name, tensor in one.state.items() if name.startswith(HEAD)}
            found.append(Held(parts[one.group.name], one.state, one.weight, lacking, shares))
        return found

    def _labels(self, context: RoundContext) -> dict[str, State]:
        """Which rows participants hold: as they said in their first round, or are asked now; of those that answer."""
        groups, found = group_by_site(context.experiment), {}
        like = {HELD: torch.zeros(reference_of(context.experiment, self.reference).architecture.classes)}
        for site in context.participants:
            if context.has(slot := rows_of(groups[site.name].name), site.name):
                found[site.name] = context.contribution(slot, site.name)
        new = [site for site in context.participants if site.name not in found]
        expected = {LABELS: RecordSpec(like, bounded=False, check=check_labels)}
        for reply in context.ask(LABELS, {}, expected, new, needed=False):
            found[reply.site.name] = {HELD: reply[LABELS][HELD].float()}
        return found

    def _rates(self, experiment: Experiment) -> dict[str, State]:
        """By architecture, of the tensors of hidden layers with fewer channels than the reference's, the share of them."""
        large = reference_of(experiment, self.reference)
        return {group.name: _rates(large, group, self.parts(experiment)[group.name]) for group in groups_of(experiment)}


def rows_of(group: str) -> str:
    """The name of the slot of an architecture's rows."""
    return f"rows.{group}"


def _rates(large: Group, small: Group, part: Submodel) -> State:
    wide, narrow = ({layer.name: wiring.axes[layer.outputs].size for layer in wiring.layers}
                    for wiring in (wiring_of(large.architecture), wiring_of(small.architecture)))  # fmt: skip
    wiring = wiring_of(small.architecture)
    hidden = {layer.name for layer in wiring.layers if layer.kind in MIXING and not wiring.axes[layer.outputs].fixed}
    found = {}
    for name, (own, _) in part.places.items():
        layer = name.rpartition(".")[0]
        if layer in hidden and narrow[layer] < wide[own.rpartition(".")[0]]:
            found[name] = torch.tensor(narrow[layer] / wide[own.rpartition(".")[0]])
    return found


def _masked(state: State, held: torch.Tensor) -> State:
    return {name: tensor * _as_rows(held, tensor) if name.startswith(HEAD) else tensor for name, tensor in state.items()}


def _as_rows(rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, *[1] * (tensor.ndim - 1))


def _has_statistics(network: Network) -> bool:
    return any(isinstance(module, BATCH_NORM) and module.running_mean is not None for module in network.modules())
