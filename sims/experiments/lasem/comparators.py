"""The learners in LASEM's Table 1: progressive networks, soft selection as in DARTS, APD-Net."""

import copy
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.clients.data import Examples, to_float
from fedloom.clients.networks import Network, initialise
from fedloom.clients.networks.split import pieces
from fedloom.clients.objectives.layer_selection.layers import Layers
from fedloom.clients.objectives.layer_selection.session import below
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.sims.experiments.lasem.lifelong import Learner, Training
from fedloom.sims.experiments.lasem.selecting import Selecting

Make = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class Column(nn.Module):
    """A network that reads the layer inputs of earlier columns (Rusu et al. 2016, Eq. 2): f(W h + U f(V alpha h')).

    V is a 1x1 convolution from all earlier columns' channels to the channels of the layer. The first layer has no such
    inputs.
    """

    def __init__(self, network: Network, layers: Layers, earlier: list["Column"], generator: torch.Generator) -> None:
        super().__init__()
        self.whole, self.parts = network, pieces(network, layers.groups)
        self._earlier = earlier  # in a list, so that they are not trained as children
        self.scales, self.reduced, self.lateral = nn.ParameterList(), nn.ModuleList(), nn.ModuleList()
        self._extra: Tensor | None = None
        for name in layers.names:
            layer = network.get_submodule(name)
            assert isinstance(layer, nn.Conv2d)
            if earlier and name != layers.names[0]:
                self.scales.append(nn.Parameter(torch.full((len(earlier),), 1.0 / len(earlier))))
                self.reduced.append(nn.Conv2d(layer.in_channels * len(earlier), layer.in_channels, 1))
                self.lateral.append(copy.deepcopy(layer))
            layer.register_forward_hook(self._added)  # after the copy, which has no hook
        for module in (self.reduced, self.lateral):
            initialise(module, generator)

    def forward(self, images: Tensor) -> Tensor:
        return self.steps(images)[-1]

    def _added(self, layer: nn.Module, inputs: object, out: Tensor) -> Tensor:
        return out if self._extra is None else out + self._extra

    def steps(self, images: Tensor) -> list[Tensor]:
        """Return the input of every part of the network, and the output of the last part."""
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
    """Progressive networks: a new `Column` for each task. Earlier columns are frozen."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.base = Selecting({"mode": "none"}, config)

    def start(self, task: int, validation: Examples) -> Training:
        network, purpose = self.base.task(task, None, {}).network, (self.base.config.seed, "column", str(task))
        initialise(network, torch_generator(*purpose))
        column = Column(network, self.base.layers, [*self.met], torch_generator(*purpose, "lateral"))
        return Training(lambda: list(column.parameters()), lambda x, y: F.cross_entropy(column(x), y), lambda: column)

    def finish(self, task: int, training: Training) -> None:
        self.met.append(training.network().requires_grad_(False))


class Made(nn.Module):
    """A network whose weights, by name, `make` computes at each use from its own and shared parameters."""

    def __init__(
        self, network: Network, parameters: Mapping[str, Tensor], make: Make, shared: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__()
        self.body, self.make, self._shared = network, make, dict(shared)  # in a dict: all tasks share them
        self.own = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(parameter.clone()) for name, parameter in parameters.items()}
        )

    def weights(self) -> dict[str, Tensor]:
        """Return the network's computed weights by name."""
        return self.make({**{name.replace("/", "."): parameter for name, parameter in self.own.items()}, **self._shared})

    def forward(self, images: Tensor) -> Tensor:
        return functional_call(self.body, self.weights(), (images,))


class Darts(Learner):
    """DARTS (Liu et al. 2019) as a soft choice between a shared and an own layer.

    The weights of a layer are the mean of both, weighted by softmax(alpha). In turn, alpha moves along the gradient on
    validation examples, and weights on training examples (first order). Selections stay soft.
    """

    def __init__(self, config: Config, learner: str, rate: float = 0.1) -> None:
        super().__init__()
        self.base, self.rate = Selecting({"mode": "all", "learner": {"name": learner}}, config), rate
        self.shared = {name: nn.Parameter(parameter.clone()) for name, parameter in self.base.shared.items()}

    def start(self, task: int, validation: Examples) -> Training:
        layers, config, body = self.base.layers, self.base.config, self.base.task(task, None, {}).network
        initialise(body, torch_generator(config.seed, "darts", str(task)))
        added = {f"added.{name}": weight for name, weight in layers.own(config, self.base.sites[task]).items()}
        parameters = {**{f"alpha.{index}": torch.zeros(2) for index in range(len(layers.groups))}, **added}
        network = dict(body.named_parameters())

        def make(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
            shared = {name: weight for name, weight in state.items() if name in self.shared}
            soft = [torch.softmax(state[f"alpha.{index}"], 0) for index in range(len(layers.groups))]
            return {name: soft[index][0] * weight + soft[index][1] * network[name]
                    for name, weight in layers.weights(shared, below(state, "added.")).items()
                    for index in [layers.group_of(name)]}  # fmt: skip

        made = Made(body, parameters, make, self.shared)
        alphas = [parameter for name, parameter in made.own.items() if name.startswith("alpha")]
        soft = {id(alpha) for alpha in alphas}
        weights = [*(parameter for parameter in made.parameters() if id(parameter) not in soft), *self.shared.values()]
        draw = torch_generator(config.seed, "darts", str(task), "validation")

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            indices = torch.randint(len(validation), (len(images),), generator=draw)
            held_out = F.cross_entropy(made(to_float(validation.x[indices])), validation.y[indices])
            with torch.no_grad():
                for alpha, gradient in zip(alphas, torch.autograd.grad(held_out, alphas), strict=True):
                    alpha -= self.rate * gradient
            return F.cross_entropy(made(images), labels)

        return Training(lambda: weights, loss, lambda: made)


class Apd(Learner):
    """APD-Net (Yoon et al. 2020, Eq. 2), without its clusters of tasks: theta_t = sigma x M_t + tau_t, with a mask M_t.

    The mask has one value for each output channel. The loss has an L1 norm of all tau. It also holds the weights of earlier
    tasks, whose tau are trained too.
    """

    def __init__(self, config: Config, sparse: float = 4e-4, hold: float = 100.0) -> None:
        super().__init__()
        self.base, self.sparse, self.hold = Selecting({"mode": "all"}, config), sparse, hold
        self.shared = {name: nn.Parameter(parameter.clone()) for name, parameter in self.base.shared.items()}

    def start(self, task: int, validation: Examples) -> Training:
        body = self.base.task(task, None, {}).network
        initialise(body, torch_generator(self.base.config.seed, "apd", str(task)))
        for name, parameter in body.named_parameters():
            parameter.requires_grad_(name not in self.shared)
        masks = {f"mask.{name}": torch.full((len(parameter),), 2.0) for name, parameter in self.shared.items()}
        added = {f"tau.{name}": torch.zeros_like(parameter) for name, parameter in self.shared.items()}
        before = [{name: parameter.detach() for name, parameter in made.weights().items()} for made in self.met]
        made = Made(body, {**masks, **added}, self._weights, self.shared)
        own = [parameter for parameter in made.parameters() if parameter.requires_grad]
        moving = [*own, *self.shared.values(), *(parameter for earlier in self.met for parameter in earlier.own.values())]

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            total = F.cross_entropy(made(images), labels)
            for network in (made, *self.met):
                taus = [tensor.abs().sum() for name, tensor in network.own.items() if "tau" in name]
                total = total + self.sparse * torch.stack(taus).sum()
            for network, weights in zip(self.met, before, strict=True):
                now = network.weights()
                moved = [(now[name] - tensor).square().sum() for name, tensor in weights.items()]
                total = total + self.hold * torch.stack(moved).sum()
            return total

        return Training(lambda: moving, loss, lambda: made)

    def finish(self, task: int, training: Training) -> None:
        super().finish(task, training)
        self.met[-1].body.requires_grad_(False)

    def _weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: state[name] * torch.sigmoid(state[f"mask.{name}"]).view(-1, *[1] * (state[name].ndim - 1))
                + state[f"tau.{name}"] for name in self.shared}  # fmt: skip
