"""What LASEM is compared with in its Table 1: progressive networks, DARTS-style soft selection, APD-Net."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.clients.data import Images, to_float
from fedloom.clients.networks import Network, initialise
from fedloom.clients.networks.split import pieces
from fedloom.clients.objectives.layer_selection.layers import Layers
from fedloom.clients.objectives.layer_selection.session import below
from fedloom.conf.randomness import torch_generator
from fedloom.sims.experiments.lasem.lifelong import Learner, Training
from fedloom.sims.experiments.lasem.selecting import Selecting

Make = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class Column(nn.Module):
    """A network that reads, at every layer but the first, what earlier columns have there (Rusu et al. 2016, Eq. 2):
    f(W h + U f(V alpha h')), V a 1x1 convolution of all earlier columns' channels to as many as the layer takes."""

    def __init__(self, network: Network, layers: Layers, earlier: list["Column"], generator: torch.Generator) -> None:
        super().__init__()
        self.whole, self.parts = network, pieces(network, layers.groups)
        self._earlier = earlier  # which makes them no children: they stay as they are
        self.scales, self.reduced, self.lateral = nn.ParameterList(), nn.ModuleList(), nn.ModuleList()
        self._extra: Tensor | None = None
        for name in layers.names:
            layer = network.get_submodule(name)
            assert isinstance(layer, nn.Conv2d)
            if earlier and name != layers.names[0]:
                self.scales.append(nn.Parameter(torch.full((len(earlier),), 1.0 / len(earlier))))
                self.reduced.append(nn.Conv2d(layer.in_channels * len(earlier), layer.in_channels, 1))
                self.lateral.append(copy.deepcopy(layer))
            layer.register_forward_hook(self._added)  # behind the copy, which has none
        for module in (self.reduced, self.lateral):
            initialise(module, generator)

    def forward(self, images: Tensor) -> Tensor:
        return self.steps(images)[-1]

    def _added(self, layer: nn.Module, inputs: object, out: Tensor) -> Tensor:
        return out if self._extra is None else out + self._extra

    def steps(self, images: Tensor) -> list[Tensor]:
        """What goes into every part, and what comes out of the last one."""
        with torch.no_grad():
            others = [column.steps(images) for column in self._earlier]
        inputs, sides = [images], list(zip(self.scales, self.reduced, self.lateral, strict=True))
        for index, part in enumerate(self.parts):
            self._extra = None
            if others and 0 < index < len(self.parts) - 1:
                scale, reduce, lateral = sides[index - 1]
                before = torch.cat([a * column_steps[index] for a, column_steps in zip(scale, others, strict=True)], 1)
                self._extra = lateral(F.relu(reduce(before)))
            inputs.append(part(inputs[-1]))
        return inputs


class Progressive(Learner):
    """A column for each task; earlier ones are frozen."""

    def __init__(self, config: Any) -> None:
        self.base = Selecting({"mode": "none"}, config)
        self.columns: list[Column] = []

    def start(self, task: int, validation: Images) -> Training:
        network, purpose = self.base.task(task, None, {}).network, (self.base.config.seed, "column", str(task))
        initialise(network, torch_generator(*purpose))
        column = Column(network, self.base.layers, list(self.columns), torch_generator(*purpose, "lateral"))
        return Plain(column, lambda images, labels: F.cross_entropy(column(images), labels))

    def finish(self, task: int, training: Training) -> None:
        column = training.network()
        assert isinstance(column, Column)
        self.columns.append(column.requires_grad_(False))

    def network(self, task: int) -> nn.Module:
        return self.columns[task]


class Plain(Training):
    """A module and its loss."""

    def __init__(self, module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.module, self._loss = module, loss

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self._loss(images, labels)

    def network(self) -> nn.Module:
        return self.module


class Made(nn.Module):
    """A network some of whose weights are made of parameters when it is used. `make` gives them by the network's names."""

    def __init__(
        self, network: Network, parameters: Mapping[str, Tensor], make: Make, shared: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__()
        self.body, self.make, self._shared = network, make, dict(shared)  # shared ones are no children: all tasks have them
        self.own = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(parameter.clone()) for name, parameter in parameters.items()}
        )

    def state(self) -> dict[str, Tensor]:
        """Own and shared parameters by name."""
        return {**{name.replace("/", "."): parameter for name, parameter in self.own.items()}, **self._shared}

    def forward(self, images: Tensor) -> Tensor:
        return functional_call(self.body, self.make(self.state()), (images,))


class Darts(Learner):
    """DARTS (Liu et al. 2019) as a soft choice between a shared and an own layer: a layer's weights are the mean of both,
    weighted by softmax(alpha); alpha moves along the gradient on validation images, weights on training images, in turn
    (first order). Selections stay soft."""

    def __init__(self, config: Any, learner: str, rate: float = 0.1) -> None:
        self.base, self.rate = Selecting({"mode": "all", "learner": {"name": learner}}, config), rate
        self.shared = {name: nn.Parameter(parameter.clone()) for name, parameter in self.base.shared.items()}
        self.met: list[Made] = []

    def start(self, task: int, validation: Images) -> Training:
        layers, begun = self.base.layers, self.base.task(task, None, {})
        initialise(begun.network, torch_generator(self.base.config.seed, "darts", str(task)))
        added = layers.own(self.base.config, self.base.sites[task])
        alphas = {f"alpha.{index}": torch.zeros(2) for index in range(len(layers.groups))}
        network = dict(begun.network.named_parameters())

        def make(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
            own = below(state, "added.")
            weights = layers.weights({name: weight for name, weight in state.items() if name in self.shared}, own)
            soft = [torch.softmax(state[f"alpha.{index}"], 0) for index in range(len(layers.groups))]
            return {name: soft[index][0] * weight + soft[index][1] * network[name]
                    for name, weight in weights.items() for index in [layers.group_of(name)]}  # fmt: skip

        made = Made(
            begun.network, {**alphas, **{f"added.{name}": weight for name, weight in added.items()}}, make, self.shared
        )
        draw = torch_generator(self.base.config.seed, "darts", str(task), "validation")
        return _Softly(made, validation, self.rate, draw)

    def finish(self, task: int, training: Training) -> None:
        made = training.network()
        assert isinstance(made, Made)
        self.met.append(made)

    def network(self, task: int) -> nn.Module:
        return self.met[task]


class _Softly(Training):
    def __init__(self, made: Made, validation: Images, rate: float, draw: torch.Generator) -> None:
        self.made, self.validation, self.rate, self.draw = made, validation, rate, draw
        self.alphas = [alpha for name, alpha in made.own.items() if name.startswith("alpha")]

    def parameters(self) -> list[nn.Parameter]:
        alphas = {id(parameter) for parameter in self.alphas}
        return [
            *(parameter for parameter in self.made.parameters() if id(parameter) not in alphas),
            *self.made._shared.values(),
        ]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        places = torch.randint(len(self.validation), (len(images),), generator=self.draw)
        held = F.cross_entropy(self.made(to_float(self.validation.x[places])), self.validation.y[places])
        with torch.no_grad():
            for alpha, gradient in zip(self.alphas, torch.autograd.grad(held, self.alphas), strict=True):
                alpha -= self.rate * gradient
        return F.cross_entropy(self.made(images), labels)

    def network(self) -> nn.Module:
        return self.made


class Apd(Learner):
    """APD-Net (Yoon et al. 2020, Eq. 2): theta_t = sigma x M_t + tau_t with a mask M_t for each output channel; the loss has
    an L1 norm of all tau, and holds the weights of earlier tasks, whose tau move along. Without its clusters of tasks."""

    def __init__(self, config: Any, sparse: float = 4e-4, hold: float = 100.0) -> None:
        self.base, self.sparse, self.hold = Selecting({"mode": "all"}, config), sparse, hold
        self.shared = {name: nn.Parameter(parameter.clone()) for name, parameter in self.base.shared.items()}
        self.met: list[Made] = []
        self.were: list[dict[str, Tensor]] = []

    def start(self, task: int, validation: Images) -> Training:
        begun = self.base.task(task, None, {})
        initialise(begun.network, torch_generator(self.base.config.seed, "apd", str(task)))
        for name, parameter in begun.network.named_parameters():
            parameter.requires_grad_(name not in self.shared)
        masks = {f"mask.{name}": torch.full((len(parameter),), 2.0) for name, parameter in self.shared.items()}
        added = {f"tau.{name}": torch.zeros_like(parameter) for name, parameter in self.shared.items()}
        self.were = [{name: parameter.detach() for name, parameter in made.make(made.state()).items()} for made in self.met]
        made = Made(begun.network, {**masks, **added}, self._weights, self.shared)
        return _Additive(self, made)

    def finish(self, task: int, training: Training) -> None:
        made = training.network()
        assert isinstance(made, Made)
        for parameter in made.body.parameters():
            parameter.requires_grad_(False)
        self.met.append(made)

    def network(self, task: int) -> nn.Module:
        return self.met[task]

    def _weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: state[name] * torch.sigmoid(state[f"mask.{name}"]).view(-1, *[1] * (state[name].ndim - 1))
                + state[f"tau.{name}"] for name in self.shared}  # fmt: skip


class _Additive(Training):
    def __init__(self, learner: Apd, made: Made) -> None:
        self.learner, self.made = learner, made

    def parameters(self) -> list[nn.Parameter]:
        own = [parameter for parameter in self.made.parameters() if parameter.requires_grad]
        earlier = [parameter for made in self.learner.met for parameter in made.own.values()]
        return [*own, *self.learner.shared.values(), *earlier]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        total = F.cross_entropy(self.made(images), labels)
        for made in [self.made, *self.learner.met]:
            total = total + self.learner.sparse * _sum(
                tensor.abs().sum() for name, tensor in made.own.items() if "tau" in name
            )
        for made, were in zip(self.learner.met, self.learner.were, strict=True):
            now = made.make(made.state())
            total = total + self.learner.hold * _sum((now[name] - tensor).square().sum() for name, tensor in were.items())
        return total

    def network(self) -> nn.Module:
        return self.made


def _sum(tensors: Any) -> Tensor:
    return torch.stack(list(tensors)).sum()
