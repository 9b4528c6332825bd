"""Ditto at the server (Li et al. 2021): FedAvg. Personal networks stay at the sites."""

from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError
from fedloom.server.rounds.view import View
from fedloom.server.strategies.averaging import Averaging
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence


@STRATEGIES.register("ditto")
class Ditto(Averaging):
    """FedAvg for the shared network. Row `personal` in tables shows the sites' own networks, each measured at its site."""

    default_objective = "ditto"
    personal = True

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        if experiment.training.clip:
            raise UserError(
                "training.clip: ditto trains two networks at once, and clipping would use their joint norm; set it to 0"
            )

    def residue(self, view: View, names: tuple[str, ...] = ()) -> list[ResidualInfluence]:  # pyright: ignore
        """Return the traces of FedAvg, and the sites' personal networks."""
        traces = super().residue(view, names)
        reason = "they were trained to stay near networks that include the forgotten sites; the server does not have them"
        return [*traces, ResidualInfluence("the other sites' personal networks", reason)] if traces else []
