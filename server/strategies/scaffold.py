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
    """SCAFFOLD: x <- x + rate (mean - x) over the sites that answered, with a control variate for each site.

    c is the mean of all sites' variates, which are zero for sites that have never trained. Sites put networks and variates
    into one slot, so c is always exactly that mean.
    """

    default_objective: ClassVar[str] = "scaffold"
    reads_contributions: ClassVar[bool] = True
    unrestorable: ClassVar[str] = "the sites' control variates do not fit the network that has moved back"

    weighting: str = option("equal", "how sites count in both means", choices=("samples", "equal"))
    rate: float = option(1.0, "learning rate of the server", low=0.0)

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """Return a resumable slot: a site that lost its variate restores it from its last contribution."""
        return {NETWORKS: Sum(weighted=self.weighting == "samples", resumable=True)}

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        check_steps(experiment)
        for section, key in (("federation", "clip_change"), ("privacy", "noise")):
            if getattr(getattr(experiment, section), key):
                raise UserError(f"{section}.{key}: the server's variate would differ from the one with which a site "
                                "corrects its steps; set it to 0, or use strategy.name=fedavg")  # fmt: skip

    def extra_broadcast(self, context: RoundContext) -> State:
        return self.control(context)

    def control(self, view: View) -> State:
        """Return c, the mean control variate, by the names under which it is sent.

        The number of images of a site that has never trained is not known, so it gets the mean weight of the others.
        """
        parameters = parameters_of(view.experiment)
        zeros = {CONTROL + name: torch.zeros_like(tensor) for name, tensor in view.initial().items() if name in parameters}
        if not (trained := [site for site in view.sites if view.has(NETWORKS, site.name)]):
            return zeros
        mean, share = view.mean(NETWORKS), len(trained) / len(view.sites)
        return {name: mean[name] * share for name in zeros}

    def step(self, last: Mapping[str, State], mean: State, parameters: frozenset[str]) -> dict[str, State]:
        network = {**last[NETWORK]}
        for name in network.keys() & mean.keys():
            network[name] = torch.lerp(network[name], mean[name], self.rate if name in parameters else 1.0)
        return {NETWORK: network}
