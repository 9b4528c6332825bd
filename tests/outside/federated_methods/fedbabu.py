"""FedBABU (Oh et al., Toward Enhanced Representation for Federated Image Classification, 2022): the head stays as drawn.

Only the body is trained and averaged (Sec. 4). A site fine-tunes the head on its own images before it uses the network.
"""

from dataclasses import dataclass

from fedloom.clients.objectives import MEAN, MODEL, SITE, Examples, Objective, PlainSession, State, Task, state_of
from fedloom.clients.training.learner import learn
from fedloom.server.strategies import TRAIN, Model, Models, RecordSpec, RoundContext, Strategy, Sum, View

BODY = "extractor."


@dataclass(frozen=True)
class Body(Objective):
    def session(self, task: Task) -> PlainSession:
        return PartSession(task, BODY)

    def network(self, task: Task, images: Examples) -> State:
        learn(session := PartSession(task, "head."), images, task.experiment, task.site, task.round, task.device)
        return state_of(session.network)


class PartSession(PlainSession):
    def __init__(self, task: Task, part: str) -> None:
        self.part = part
        super().__init__(task)

    def start(self) -> State:
        return self.task.incoming.get(MODEL) or self.task.incoming[MEAN]

    def weights(self):
        return {name: weight for name, weight in super().weights().items() if name.startswith(self.part)}

    def contribution(self) -> dict[str, State]:
        return {SITE: {name: tensor for name, tensor in state_of(self.network).items() if name.startswith(self.part)}}


class FedBabu(Strategy):
    def slots(self, experiment):
        return {"bodies": Sum()}

    def begin(self, context: RoundContext) -> None:
        context.put_all("bodies", {name: tensor for name, tensor in context.initial().items() if name.startswith(BODY)})

    def round(self, context: RoundContext) -> None:
        context.gather(TRAIN, {MEAN: {**context.initial(), **context.mean("bodies")}}, {SITE: RecordSpec(slot="bodies")})

    def models(self, view: View) -> Models:
        return Models({"fedbabu": lambda: Model(view.architecture(), {**view.initial(), **view.mean("bodies")})})
