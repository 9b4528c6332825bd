"""Ditto at the server (Li et al. 2021): FedAvg. What is personal stays at the sites."""

from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError
from fedloom.server.rounds.view import View
from fedloom.server.strategies.averaging import Averaging
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence


@STRATEGIES.register("ditto")
class Ditto(Averaging):
    """The shared network is FedAvg's; `personal` in tables: the sites' own, each measured at its site."""

    default_objective = "ditto"
    personal = True

    def check(self, experiment: Experiment) -> None:
        """UserError for gradients that are clipped: the norm would be that of both networks."""
        super().check(experiment)
        if experiment.training.clip:
            raise UserError(
                "training.clip: strategy ditto trains two networks at once, whose gradients have one norm; set it to 0"
            )

    def residue(self, view: View, names: tuple[str, ...] = ()) -> list[ResidualInfluence]:  # pyright: ignore
        """The same, and the sites' own networks."""
        found = super().residue(view, names)
        why = "they were held near networks in which those of the forgotten sites were; the server does not have them"
        return [*found, ResidualInfluence("the other sites' personal networks", why)] if found else []
