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
from fedloom.server.strategies.by_architecture import averaged, counted, network_key
from fedloom.server.strategies.in_parts import InParts

HEAD = "head."  # prefix of the last layer's tensors, [outputs, ...]


@STRATEGIES.register("heterofl")
@dataclass(frozen=True)
class HeteroFL(InParts):
    """HeteroFL (Alg. 1, weighted by images): every coordinate becomes the mean over the sites that hold it.

    A coordinate without holders does not change. A site holds the first channels of each layer, and in the last layer the
    rows of its labels. The objective is `heterofl`. Slots, by architecture: the sum of the networks, in which rows that a
    site does not hold are 0, and the sum of the held rows.
    """

    default_objective: ClassVar[str] = "heterofl"

    def check(self, experiment: Experiment) -> None:
        check_objective(experiment, self, "heterofl")
        super().check(experiment)
        running = experiment.evaluation.statistics == "running"
        if name := next(
            (group.name for group in groups_of(experiment) if running and _has_statistics(group.architecture.build())), ""
        ):
            problem = f"strategy heterofl trains {name} with static BatchNorm, which has no running statistics"
            raise UserError(f"evaluation.statistics: got 'running', but {problem}; takes recomputed or batch")

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        rows = {rows_of(group.name): Sum(weighted=True) for group in groups_of(experiment)}
        return {**super().slots(experiment), **rows}

    def round(self, context: RoundContext) -> None:
        """Send every site its part, rates and labels. Store its network without the rows that it does not hold."""
        self.move_back(context)
        groups, rates = group_by_site(context.experiment), self._rates(context.experiment)
        sent, labels = (
            {group.name: context.server_state(network_key(group.name)) for group in groups_of(context.experiment)},
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
        """Return the mean networks as parts of the reference, with the share of sites that hold each row."""
        parts, counting = self.parts(view.experiment), counted(view)
        parts_held = []
        for mean in averaged(view):
            share = counting.mean(rows_of(mean.group.name))[HELD]
            shares = {name: _as_rows(share, tensor) for name, tensor in mean.state.items() if name.startswith(HEAD)}
            parts_held.append(Held(parts[mean.group.name], mean.state, mean.weight, lacking, shares))
        return parts_held

    def _labels(self, context: RoundContext) -> dict[str, State]:
        """Return the rows that participants hold: from an earlier round, or asked now. Sites may fail to answer."""
        groups, labels = group_by_site(context.experiment), {}
        like = {HELD: torch.zeros(reference_of(context.experiment, self.reference).architecture.outputs)}
        for site in context.participants:
            if context.has(slot := rows_of(groups[site.name].name), site.name):
                labels[site.name] = context.contribution(slot, site.name)
        new = [site for site in context.participants if site.name not in labels]
        expected = {LABELS: RecordSpec(like, bounded=False, check=check_labels)}
        for reply in context.ask(LABELS, {}, expected, new, needed=False):
            labels[reply.site.name] = {HELD: reply[LABELS][HELD].float()}
        return labels

    def _rates(self, experiment: Experiment) -> dict[str, State]:
        """Return, by architecture, the share of the reference's channels in each narrower hidden tensor."""
        large = reference_of(experiment, self.reference)
        return {group.name: _rates(large, group, self.parts(experiment)[group.name]) for group in groups_of(experiment)}


def rows_of(group: str) -> str:
    """Return the slot's name for the head rows that sites of `group` hold."""
    return f"rows.{group}"


def _rates(large: Group, small: Group, part: Submodel) -> State:
    wide, narrow = ({layer.name: wiring.axes[layer.outputs].size for layer in wiring.layers}
                    for wiring in (wiring_of(large.architecture), wiring_of(small.architecture)))  # fmt: skip
    wiring = wiring_of(small.architecture)
    hidden = {layer.name for layer in wiring.layers if layer.kind in MIXING and not wiring.axes[layer.outputs].fixed}
    rates = {}
    for name, (own, _) in part.places.items():
        layer = name.rpartition(".")[0]
        if layer in hidden and narrow[layer] < wide[own.rpartition(".")[0]]:
            rates[name] = torch.tensor(narrow[layer] / wide[own.rpartition(".")[0]])
    return rates


def _masked(state: State, held: torch.Tensor) -> State:
    return {name: tensor * _as_rows(held, tensor) if name.startswith(HEAD) else tensor for name, tensor in state.items()}


def _as_rows(rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, *[1] * (tensor.ndim - 1))


def _has_statistics(network: Network) -> bool:
    return any(isinstance(module, BATCH_NORM) and module.running_mean is not None for module in network.modules())
