"""FedDF (Lin et al. 2020): each architecture's mean learns the answers of all sites' networks to unlabelled images."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedloom.clients.objectives import Experiment
from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.rounds.view import View
from fedloom.server.strategies.base import STRATEGIES
from fedloom.server.strategies.by_architecture import ByArchitecture, averaged
from fedloom.server.strategies.public import PublicImages
from fedloom.server.strategies.server_training import ServerTraining


@STRATEGIES.register("feddf")
@dataclass(frozen=True)
class FedDF(ByArchitecture):
    """Distillation (Alg. 3) of the mean of all sites' logits into the architectures' means, at temperature 1."""

    public: PublicImages = option(PublicImages, "the images for the distillation")
    steps: int = option(300, "steps of Adam in each round, for each architecture", low=1, high=1_000_000)
    rate: float = option(1e-3, "initial learning rate; it decays to 0 by a half cosine", low=0.0, high=1.0)
    batch: int = option(128, "images per step", low=2)

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        self._training.check(experiment, "strategy.public")

    def combined(self, view: View) -> Mapping[str, State]:
        means = {mean.group.name: mean.state for mean in averaged(view)}
        return self._training.trained(view, means, "strategy.public")

    @property
    def _training(self) -> ServerTraining:
        return ServerTraining(self.steps, self.rate, self.batch, images=self.public)
