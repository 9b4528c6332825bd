"""SCAFFOLD at the server (Karimireddy et al. 2020, Stochastic Controlled Averaging for Federated Learning, Alg. 1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.scaffold import CONTROL
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.view import View
from fedloom.server.strategies.averaging import NETWORK, NETWORKS, Averaging, check_steps, parameters_of
from fedloom.server.strategies.base import STRATEGIES


@STRATEGIES.register("scaffold")
@dataclass(frozen=True)
class Scaffold(Averaging):
    """x <- x + rate (mean - x) over the sites that answered; c is the mean of all sites' variates, of which those that have
    never trained are zero. Sites put networks and variates into one slot, so that c is always that mean, exactly."""

    default_objective: ClassVar[str] = "scaffold"

    weighting: str = option("equal", "how sites count in both means: alike, or by images", choices=("samples", "equal"))
    rate: float = option(1.0, "of the server", low=0.0)

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """A site that lost its variate takes it from what it sent last."""
        return {NETWORKS: Sum(weighted=self.weighting == "samples", resumable=True)}

    def check(self, experiment: Experiment) -> None:
        """UserError for sites whose steps are not of plain SGD, and for variates that would not be the sites' own."""
        super().check(experiment)
        check_steps(experiment)
        for section, key in (("federation", "clip_change"), ("privacy", "noise")):
            if getattr(getattr(experiment, section), key):
                raise UserError(f"{section}.{key}: what is scaled or noised of a variate is not what sites of scaffold "
                                "correct by; set it to 0, or take strategy.name=fedavg")  # fmt: skip

    def extra_broadcast(self, context: RoundContext) -> State:
        """c."""
        return self.control(context)

    def control(self, view: View) -> State:
        """c, by the names that it travels under. Of sites that have never trained no number of images is known: they count
        as the others do on average."""
        parameters = parameters_of(view.experiment)
        zeros = {CONTROL + name: torch.zeros_like(one) for name, one in view.initial().items() if name in parameters}
        here = [site for site in view.sites if view.has(NETWORKS, site.name)]
        if not here:
            return zeros
        mean, share = view.mean(NETWORKS), len(here) / len(view.sites)
        return {name: mean[name] * share for name in zeros}

    def step(self, last: Mapping[str, State], mean: State, parameters: frozenset[str]) -> dict[str, State]:
        network = {**last[NETWORK]}
        for name in network.keys() & mean.keys():
            network[name] = torch.lerp(network[name], mean[name], self.rate if name in parameters else 1.0)
        return {NETWORK: network}
