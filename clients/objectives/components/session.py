"""Sessions of a site that trains its own extractor and head, and the auxiliary heads that all sites share."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.clients.networks import Architecture
from fedloom.clients.networks.base import HEAD
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives.base import Task
from fedloom.clients.objectives.components.auxiliary import Auxiliary, Batch, Layer
from fedloom.clients.objectives.components.sharing import Sharing
from fedloom.clients.objectives.plain import PlainSession, below, state_of
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.fusion.state import State

AUXILIARY_HEADS = "auxiliary"  # record of auxiliary heads, down and up; names are TASK.TENSOR
COMMON = "common"  # down: for each output of the site's network, its class number among the common ones, or -1
FROZEN = "frozen"  # down: do not train the auxiliary heads
START = "start"  # down, to sites that have not trained yet: parts of a pretrained network
HELD = "held"
NUMBER = "number"  # in COMMON: the number of common classes


class SharedParts(PlainSession):
    """Trains the site's network, with the shared part from the server. Only this part is sent back."""

    def __init__(self, task: Task, sharing: Sharing, alike: bool = False) -> None:
        self.sharing, self.alike = sharing, alike
        super().__init__(task)

    def start(self) -> State:
        """Return the site's state of its last round, or `first`, with the server's shared tensors in place of its own."""
        return {**(self.task.own or self.first()), **self.task.incoming.get(MEAN, {})}

    def first(self) -> State:
        """Return the site's first state, seeded by its name.

        All sites share the whole state (`alike`), or the parts `sharing.common`. Pretrained parts from the server (START)
        replace their tensors.
        """
        config, site = self.task.config, self.task.site
        shared = initial_state(config, site=site)
        pretrained = self.task.incoming.get(START, {})
        if self.alike:
            return {**shared, **pretrained}
        common = {
            name: tensor for name, tensor in shared.items() if self.sharing.common and name.startswith(self.sharing.common)
        }
        return {**initial_state(config, site.name, site), **common, **pretrained}

    def stages(self) -> Sequence[tuple[float, list[nn.Parameter]]]:
        return [(end, [weight for name, weight in self.weights().items() if name.startswith(prefixes)])
                for end, prefixes in self.sharing.stages]  # fmt: skip

    def contribution(self) -> dict[str, State]:
        return {SITE: self.sharing.part(state_of(self.network))} if self.sharing.averaged else {}

    def local_state(self) -> State | None:
        return state_of(self.network)


class CompatibleSession(SharedParts):
    """Adds auxiliary heads (Eq. 1 and 2), and pulls the task head to the auxiliary head of the common classes."""

    def __init__(
        self, task: Task, sharing: Sharing, alike: bool, tasks: Mapping[str, Auxiliary], pull: float, unit: float
    ) -> None:
        super().__init__(task, sharing, alike)
        self.tasks, self.pull, self.unit = tasks, pull, unit
        sent = {name: tensor.to(task.device) for name, tensor in task.incoming.get(AUXILIARY_HEADS, {}).items()}
        common = task.incoming.get(COMMON, {})
        nothing = torch.full((self.outputs.stop,), -1)
        self.common = common.get(COMMON, nothing).to(task.device)
        self.frozen = FROZEN in task.incoming
        own = task.architecture
        self.heads = {name: head_of(own, auxiliary.outputs(int(common[NUMBER]))).to(task.device).train()
                      for name, auxiliary in tasks.items()}  # fmt: skip
        for name, head in self.heads.items():
            head.load_state_dict(below(sent, f"{name}."))
        self.by_class = {HEAD + key for key in class_tensors(own)}
        self.near = self._near(sent, own) if pull else {}

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights to train: of the site's network and, unless frozen, of its copies of the auxiliary heads."""
        heads = {} if self.frozen else self.heads
        copies = {
            f"{AUXILIARY_HEADS}.{name}.{key}": weight
            for name, head in heads.items()
            for key, weight in head.named_parameters()
        }
        return {**self.parts, **copies}

    def stages(self) -> Sequence[tuple[float, list[nn.Parameter]]]:
        return [(1.0, self.parameters())]

    def per_step_inputs(self) -> tuple[State, ...]:
        """Return the site's own inputs of the loss (common classes, pull targets), and each task's random draws."""
        images = self.task.config.training.batch
        mine = {COMMON: self.common, **self.near}
        return mine, *(auxiliary.draw(self.task.generator, images) for auxiliary in self.tasks.values())

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        extract = self._layer(self.network.extractor, weights, "extractor.")
        features = extract(images)
        scores = self._layer(self.network.head, weights, HEAD)(features)
        loss = self.task.loss(scores[..., self.outputs], labels)
        mine, *drawn_by_task = drawn
        batch = Batch(images, features, mine[COMMON][labels + self.outputs.start])
        for (name, auxiliary), random in zip(self.tasks.items(), drawn_by_task, strict=True):
            head = self._layer(self.heads[name], weights, f"{AUXILIARY_HEADS}.{name}.")
            loss = loss + auxiliary.weight * auxiliary.loss(extract, head, batch, random)
        if self.unit:
            loss = loss + self.unit * off_unit_length(features)
        for name in self.near.keys() - {HELD}:
            apart = (weights[name] - mine[name]).square()
            rows = mine[HELD].view(-1, *[1] * (apart.ndim - 1)) if name in self.by_class else 1.0
            loss = loss + self.pull * (apart * rows).sum()
        return loss

    def contribution(self) -> dict[str, State]:
        if self.frozen or not self.tasks:
            return {}
        return {AUXILIARY_HEADS: {f"{name}.{key}": tensor for name, head in self.heads.items()
                                  for key, tensor in state_of(head).items()}}  # fmt: skip

    def _layer(self, module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> Layer:
        """Return a part of the network with these weights."""
        own = below(weights, prefix)
        if all(own.get(name, weight) is weight for name, weight in module.named_parameters()):
            return module
        return lambda images: functional_call(module, own, (images,))

    def _near(self, heads: State, own: Architecture) -> State:
        """Return the target of each weight of the task head: the auxiliary head of the common classes.

        HELD: 1 for rows of classes with a target, else 0. (With a head of rotations as the target, own accuracy on digits
        fell by five points, and heads fitted no better.)
        """
        name = next((name for name, auxiliary in self.tasks.items() if auxiliary.supervised), "")
        if not name:
            return {}
        known = len(heads[next(f"{name}.{key}" for key in class_tensors(own))])
        near: State = {HELD: ((self.common >= 0) & (self.common < known)).float()}
        rows = self.common.clamp(0, known - 1)
        for key, _ in self.network.head.named_parameters():
            goal = heads[f"{name}.{key}"]
            near[HEAD + key] = goal[rows] if HEAD + key in self.by_class else goal
        return near


def off_unit_length(features: Tensor) -> Tensor:
    """Return the loss for unit length of features f [n, ...]: the mean of (||f|| - 1)^2 (components, App. C.1)."""
    return (features.flatten(1).norm(dim=1) - 1.0).square().mean()


def head_of(architecture: Architecture, outputs: int) -> nn.Module:
    """Build a head like the architecture's with `outputs` outputs and undefined weights."""
    return architecture.with_outputs(outputs).build().head


@functools.lru_cache(maxsize=64)
def class_tensors(architecture: Architecture) -> frozenset[str]:
    """Return the names of the head's tensors whose shape depends on the number of classes."""
    heads = [head_of(architecture, architecture.outputs + more).state_dict() for more in (0, 1)]
    return frozenset(name for name, tensor in heads[0].items() if tensor.shape != heads[1][name].shape)
