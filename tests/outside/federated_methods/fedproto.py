"""FedProto (Tan et al., Federated Prototype Learning across Heterogeneous Clients, 2022): only class prototypes travel."""

from dataclasses import dataclass

import torch

from clients.initial import initial_state
from clients.objectives import Answer, Images, Objective, PlainSession, State, Task, state_of, to_float, value
from server.strategies import TRAIN, Expected, Models, Run, Strategy, Sum, View


@dataclass(frozen=True)
class Prototypes(Objective):
    weight: float = value(1.0, "of the distance to the classes' prototypes (lambda of Eq. 7)", low=0.0)

    def session(self, task: Task) -> PlainSession:
        return ProtoSession(self.weight, task)

    def answer(self, kind: str, task: Task, images: Images) -> Answer:
        network = ProtoSession(self.weight, task).network
        with torch.no_grad():
            places = network.extractor(to_float(images.x.to(task.device))).cpu()
        classes = torch.nn.functional.one_hot(images.y, len(network.state_dict()["head.bias"])).float()
        return Answer({"prototypes": {"sums": classes.T @ places, "counts": classes.sum(0)}})


class ProtoSession(PlainSession):
    def __init__(self, weight: float, task: Task) -> None:
        super().__init__(task)
        self.weight, self.given, self.own = weight, task.incoming.get("prototypes"), lambda: state_of(self.network)

    def start(self) -> State:
        return self.task.own or initial_state(self.task.config, self.task.site.name, self.task.site)

    def loss(self, images, labels):
        if self.given is None:
            return super().loss(images, labels)
        counts = self.given["counts"][labels, None]
        apart = (self.network.extractor(images) - self.given["sums"][labels] / counts.clamp(min=1)) * (counts > 0)
        return super().loss(images, labels) + self.weight * apart.square().mean()

    def contribution(self) -> dict[str, State]:
        return {}


class FedProto(Strategy):
    def slots(self, config):
        return {"prototypes": Sum()}

    def begin(self, run: Run) -> None: ...
    def round(self, run: Run) -> None:
        sent = {"prototypes": run.sum("prototypes")} if run.total("prototypes").addends else {}
        trained = [reply.site for reply in run.ask(TRAIN, sent, {})]
        classes, features = run.architecture().classes, run.initial()["head.weight"].shape[1]
        like = {"sums": torch.zeros(classes, features), "counts": torch.zeros(classes)}
        run.gather("prototypes", {}, {"prototypes": Expected(like, slot="prototypes", bounded=False)}, trained)

    def models(self, view: View) -> Models:
        return Models({})
