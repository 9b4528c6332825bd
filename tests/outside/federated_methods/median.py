"""The coordinate-wise median of the sites' last networks (Yin et al., Byzantine-Robust Distributed Learning, 2018)."""

import torch

from fedloom.clients.objectives import MEAN, SITE
from fedloom.server.strategies import TRAIN, Model, Models, PerClientSlot, RecordSpec, RoundContext, Strategy, View


class Median(Strategy):
    default_objective = "fedavg"

    def slots(self, experiment):
        return {"networks": PerClientSlot()}

    def begin(self, context: RoundContext) -> None:
        context.save_server_state("start", context.initial())

    def round(self, context: RoundContext) -> None:
        median = self.median(context)
        context.gather(TRAIN, {MEAN: median}, {SITE: RecordSpec(median, slot="networks")})

    def models(self, view: View) -> Models:
        return Models({"median": lambda: Model(view.architecture(), self.median(view))})

    def median(self, view: View):
        given = [view.contribution("networks", site.name) for site in view.sites if view.has("networks", site.name)]
        if not given:
            return view.server_state("start")
        return {name: torch.stack([one[name] for one in given]).median(0).values for name in given[0]}
