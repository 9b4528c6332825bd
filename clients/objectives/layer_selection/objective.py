"""The site's half of layer selection."""

from dataclasses import dataclass

from fedloom.clients.data import Images, outputs
from fedloom.clients.evaluation.accuracy import count_right
from fedloom.clients.networks import HeadView
from fedloom.clients.objectives.base import OBJECTIVES, Answer, Session, Task
from fedloom.clients.objectives.layer_selection.options import SelectionOptions
from fedloom.clients.objectives.layer_selection.session import SelectionSession, composed
from fedloom.clients.protocol.messages import MEAN, MODEL, RIGHT, TOTAL
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

COMPOSED = "composed"  # a question: how good is the site's network with the shared parameters that were sent


@OBJECTIVES.register("layer_selection")
@dataclass(frozen=True)
class LayerSelection(SelectionOptions):
    """LASEM (Lee et al. 2021): of every group of layers a shared and an own set of parameters, and by expectation-
    maximisation which of them the site uses."""

    def session(self, task: Task) -> Session:
        """Start on a task."""
        return SelectionSession(self, task)

    def network(self, task: Task, images: Images) -> State | None:
        """What was sent, or the site's own under its configuration, with the shared parameters that it trained last."""
        if MODEL in task.incoming:
            return task.incoming[MODEL]
        found = composed(self, task, task.incoming.get(MEAN, {}))
        return None if found is None else found[0]

    def answer(self, kind: str, task: Task, images: Images) -> Answer:
        """COMPOSED: right answers on the site's own test images with the shared parameters that were sent."""
        if kind != COMPOSED:
            return super().answer(kind, task, images)
        state = self.network(task, images)
        if state is None:
            raise UserError(f"{task.site.name}: has no network of its own yet; it has not trained")
        task.network.load_state_dict(state)
        config, test = task.config, task.held_out("test")
        view = HeadView(task.network, outputs(config, task.site.spec), config.evaluation.statistics).eval()
        try:
            right = count_right(view, test, config.evaluation.batch, task.device) if len(test) else 0
        finally:
            view.train()  # the next site trains in it
        return Answer(metrics={RIGHT: right, TOTAL: len(test)})
