"""`PlainSession`, the base class of most sessions: one network, and a loss that is a pure function of the weights."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call

from fedloom.clients.data import outputs
from fedloom.clients.objectives.base import Session, Task
from fedloom.clients.protocol.messages import MEAN
from fedloom.fusion.flat import fill, flattened
from fedloom.fusion.state import State


class PlainSession(Session):
    """Session that minimises the cross-entropy of one network, starting from the server's. It stores nothing.

    Most methods override only `loss_of` or `contribution`.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.outputs = outputs(task.config, task.site.spec)
        self.network = task.network
        fill(self.network, self.start())
        self.parts = dict(self.network.named_parameters())

    def start(self) -> State:
        """Return the network's state at the start of the round; the default is the aggregate."""
        return self.task.incoming[MEAN]

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimiser updates, by name."""
        return self.parts

    def per_step_inputs(self) -> tuple[State, ...]:
        """Return the inputs of the next batch's loss other than weights and images. Make random choices here."""
        return ()

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar: a pure function, the same for all sites of a configuration.

        Args:
            weights: The network's weights by name.
            drawn: The result of `per_step_inputs`.
            images: float32 [n, c, h, w].
            labels: int64 [n].
        """
        return self.cross_entropy(weights, images, labels)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.weights().values())

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss_of(self.weights(), self.per_step_inputs(), images, labels)

    def cross_entropy(self, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        """Return the task's loss over the outputs for the site's domain. Missing weights are the network's own."""
        config = self.task.config
        if config.engine.compile and len(images) == config.training.batch:
            from fedloom.clients.training.compiled import compiled_loss  # torch's compiler: imported only where it is used

            smoothing = config.training.label_smoothing
            loss = compiled_loss(self.network, self.outputs.start, self.outputs.stop, self.task.experiment.loss, smoothing)
            return loss(weights, images, labels)
        return self.task.loss(self.scores(weights, images), labels)

    def scores(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the network's outputs for the site's domain, [n, outputs]. Missing weights are the network's own."""
        as_it_is = all(weights.get(name, weight) is weight for name, weight in self.parts.items())
        scores = self.network(images) if as_it_is else functional_call(self.network, dict(weights), (images,))
        return scores[..., self.outputs]


def below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, with the prefix removed from the names."""
    return {name[len(prefix) :]: tensor for name, tensor in state.items() if name.startswith(prefix)}


def state_of(module: nn.Module) -> State:
    """Return a copy of the module's parameters and buffers, on the CPU."""
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    flat = flattened(state)
    return flat if flat is not state else {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
