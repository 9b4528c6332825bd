"""The client's half of layer selection."""

from dataclasses import dataclass

from fedloom.clients.data import Examples, outputs
from fedloom.clients.evaluation.accuracy import count_right
from fedloom.clients.networks import HeadView
from fedloom.clients.objectives.base import OBJECTIVES, Answer, Session, Task
from fedloom.clients.objectives.layer_selection.options import SelectionOptions
from fedloom.clients.objectives.layer_selection.session import SelectionSession, composed
from fedloom.clients.protocol.failures import UntrainedError
from fedloom.clients.protocol.messages import MEAN, MODEL, RIGHT, TOTAL
from fedloom.fusion.state import State

COMPOSED = "composed"  # question: the accuracy of the site's network with the shared parameters in the message


@OBJECTIVES.register("layer_selection")
@dataclass(frozen=True)
class LayerSelection(SelectionOptions):
    """LASEM (Lee et al. 2021): each site learns by expectation-maximisation which groups of layers to share."""

    def session(self, task: Task) -> Session:
        return SelectionSession(self, task)

    def network(self, task: Task, images: Examples) -> State | None:
        """Return the network in the message, or the site's own in its configuration."""
        if MODEL in task.incoming:
            return task.incoming[MODEL]
        result = composed(self, task, task.incoming.get(MEAN, {}))
        return None if result is None else result[0]

    def answer(self, kind: str, task: Task, images: Examples) -> Answer:
        """Answer COMPOSED: right answers on the site's test examples with the message's shared parameters."""
        if kind != COMPOSED:
            return super().answer(kind, task, images)
        state = self.network(task, images)
        if state is None:
            raise UntrainedError(task.site.name, "measure")
        task.network.load_state_dict(state)
        config, test = task.config, task.held_out("test")
        view = HeadView(task.network, outputs(config, task.site.spec), config.evaluation.statistics).eval()
        try:
            right = count_right(view, test, config.evaluation.batch, task.device) if len(test) else 0
        finally:
            view.train()  # the next site trains in it
        return Answer(metrics={RIGHT: right, TOTAL: len(test)})
