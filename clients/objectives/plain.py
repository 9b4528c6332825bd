"""What the objectives build on: a session of one network and one loss, a pure function of the weights."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call

from fedloom.clients.data import outputs
from fedloom.clients.objectives.base import Session, Task
from fedloom.clients.protocol.messages import MEAN
from fedloom.fusion.state import State


class PlainSession(Session):
    """Cross-entropy of one network that starts where the server says; nothing is kept for the next round."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.outputs = outputs(task.config, task.site.spec)
        self.network = task.network
        self.network.load_state_dict(self.start())
        self.parts = dict(self.network.named_parameters())

    def start(self) -> State:
        """Where the network starts: at the aggregate."""
        return self.task.incoming[MEAN]

    def weights(self) -> dict[str, nn.Parameter]:
        """What the optimiser moves, by name."""
        return self.parts

    def per_step_inputs(self) -> tuple[State, ...]:
        """What the loss of the next batch needs beside the weights; a random choice is made here."""
        return ()

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch at these weights: a pure function, the same one for all sites of a configuration."""
        return self.cross_entropy(weights, images, labels)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.weights().values())

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss_of(self.weights(), self.per_step_inputs(), images, labels)

    def cross_entropy(self, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        """The loss of the network with these weights (its own where there is none) over the outputs of the site's domain."""
        config = self.task.config
        if config.engine.compile and len(images) == config.training.batch:
            from fedloom.clients.training.compiled import compiled_loss  # torch's compiler: only where it is asked for

            smoothing = config.training.label_smoothing
            return compiled_loss(self.network, self.outputs.start, self.outputs.stop, smoothing)(weights, images, labels)
        return self.task.loss(self.scores(weights, images), labels)

    def scores(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The outputs of the site's domain, [n, outputs], of the network at these weights (its own where there is none)."""
        as_it_is = all(weights.get(name, weight) is weight for name, weight in self.parts.items())
        scores = self.network(images) if as_it_is else functional_call(self.network, dict(weights), (images,))
        return scores[:, self.outputs]


def state_of(module: nn.Module) -> State:
    """Parameters and buffers as they are now, on the CPU: a copy."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in module.state_dict().items()}
