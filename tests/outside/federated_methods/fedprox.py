"""FedProx (Li et al., Federated Optimization in Heterogeneous Networks, 2020): sites stay near where they start."""

from dataclasses import dataclass

from fedloom.clients.objectives import MEAN, SITE, Objective, PlainSession, State, Task, option, state_of
from fedloom.server.strategies import TRAIN, Model, Models, RecordSpec, RoundContext, Strategy, Sum, View


@dataclass(frozen=True)
class Prox(Objective):
    mu: float = option(0.01, "weight of the proximal term, mu/2 |w - w_t|^2 (Eq. 2)", low=0.0)

    def session(self, task: Task) -> PlainSession:
        return ProxSession(self.mu, task)


class ProxSession(PlainSession):
    def __init__(self, mu: float, task: Task) -> None:
        super().__init__(task)
        self.mu, self.begin = mu, {name: weight.detach().clone() for name, weight in self.weights().items()}

    def loss_of(self, weights, drawn, images, labels):
        moved = sum((weights[name] - begin).square().sum() for name, begin in self.begin.items())
        return self.cross_entropy(weights, images, labels) + self.mu / 2 * moved

    def contribution(self) -> dict[str, State]:
        return {SITE: state_of(self.network)}


@dataclass(frozen=True)
class FedProx(Strategy):
    """The mean of the sites' last networks, weighted by their numbers of images."""

    def slots(self, experiment):
        return {"networks": Sum(weighted=True)}

    def begin(self, context: RoundContext) -> None:
        context.save_server_state("start", context.initial())

    def round(self, context: RoundContext) -> None:
        mean = self.mean(context)
        context.gather(TRAIN, {MEAN: mean}, {SITE: RecordSpec(mean, slot="networks")})

    def models(self, view: View) -> Models:
        return Models({"fedprox": lambda: Model(view.architecture(), self.mean(view))})

    def mean(self, view: View) -> State:
        return view.mean("networks") if view.total("networks").addends else view.server_state("start")
