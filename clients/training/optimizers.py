"""Optimisers by name: torch.optim's with their options, or the user's own. Their state is reset in every round."""

import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fedloom.conf.errors import UserError
from fedloom.conf.plugins import call
from fedloom.conf.registry import Registry, section_of
from fedloom.conf.schema import TrainingConfig
from fedloom.conf.typed import option

WHERE = "training.optimizer"
Step = Callable[[float, Sequence[Tensor]], None]


class Rates(Protocol):
    """The options of the section `training` that optimisers use: the initial learning rate, and options of sgd."""

    @property
    def rate(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base class of an optimiser's options. `elementwise`: each entry moves on its own, so stacked sites stay separate."""

    elementwise: ClassVar[bool] = False

    @abstractmethod
    def bind(self, parameters: Sequence[Tensor], training: Rates) -> Step:
        """Return a function step(rate, gradients), which updates the parameters in place.

        Raises UserError for invalid options.
        """


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", Optimizer)


@OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class SGD(Optimizer):
    """torch.optim.SGD, in its functional form, which starts faster because it does not import torch's compiler."""

    elementwise = True
    momentum: float | None = option(None, "replaces training.momentum", low=0.0, high=1.0)
    weight_decay: float | None = option(None, "replaces training.weight_decay", low=0.0)
    dampening: float = option(0.0, "dampening of the gradient in the momentum")
    nesterov: bool = option(False, "Nesterov's momentum")
    maximize: bool = option(False, "maximise the objective instead of minimising it")

    def bind(self, parameters: Sequence[Tensor], training: Rates) -> Step:
        momentum = training.momentum if self.momentum is None else self.momentum
        decay = training.weight_decay if self.weight_decay is None else self.weight_decay
        if self.nesterov and (not momentum or self.dampening):
            raise UserError(f"{WHERE}.nesterov: takes a momentum above 0 and a dampening of 0")
        moving, buffers = list(parameters), list[Tensor | None]([None] * len(parameters))
        fixed: dict[str, Any] = {"momentum": momentum, "weight_decay": decay, "dampening": self.dampening,
                                 "nesterov": self.nesterov, "maximize": self.maximize}  # fmt: skip

        def step(rate: float, gradients: Sequence[Tensor]) -> None:
            sgd(moving, list(gradients), buffers, foreach=True, lr=rate, **fixed)

        return step


@dataclass(frozen=True)
class OfTorch(Optimizer):
    """One of torch.optim's classes. The fields are its options, with its defaults."""

    make: ClassVar[type[torch.optim.Optimizer]]

    def bind(self, parameters: Sequence[Tensor], training: Rates) -> Step:
        options = {field.name: self._given(field.name) for field in dataclasses.fields(self)}
        return _stepping(self.make, options, self.make.__name__.lower(), parameters, training.rate)

    def _given(self, name: str) -> Any:
        value, default = getattr(self, name), inspect.signature(self.make).parameters[name].default
        if not isinstance(default, tuple):
            return value
        if len(value) != len(default):
            raise UserError(f"{WHERE}.{name}: got {value}, takes {len(default)} numbers such as {list(default)}")
        return tuple(value)


@dataclass(frozen=True, eq=False)
class OwnOptimizer(Optimizer):
    """The user's own optimiser: a class, or a function that makes one, called as make(parameters, lr=rate, **options)."""

    name: str
    make: Callable[..., Any]
    options: Mapping[str, Any]

    def bind(self, parameters: Sequence[Tensor], training: Rates) -> Step:
        return _stepping(self.make, self.options, self.name, parameters, training.rate)


@OPTIMIZERS.adapter
def own_optimizer(name: str, made: Any, options: Mapping[str, Any], where: str) -> Optimizer:
    """Return the user's optimiser class or function `made` as an Optimizer. Raises UserError if it is not callable."""
    if not callable(made):
        raise UserError(f"{where}.name: '{name}' has the type {type(made).__name__}; it must be an optimiser class "
                        "or a function that returns an optimiser")  # fmt: skip
    return OwnOptimizer(name, made, options)


def _stepping(
    make: Callable[..., Any], options: Mapping[str, Any], name: str, parameters: Sequence[Tensor], rate: float
) -> Step:
    """Return the step function of make(parameters, lr=rate, **options). Parameter groups retain their ratio to `rate`."""
    made = call(functools.partial(make, list(parameters)), options, {"lr": rate}, name, WHERE)
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(f"{WHERE}.name: '{name}' returned a {type(made).__name__}; it must return a torch.optim.Optimizer")
    shares = [group["lr"] / rate if rate else 1.0 for group in made.param_groups]

    def step(rate: float, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, share in zip(made.param_groups, shares, strict=True):
            group["lr"] = rate * share
        made.step()
        made.zero_grad()

    return step


STACKED = {"adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop"}
UNFIT = {"lbfgs": "needs the loss of a batch several times per step", "sparseadam": "takes only sparse gradients"}
OURS = {"params", "lr", "differentiable"}  # parameters of torch's constructors that are not options here


def _file(make: type[torch.optim.Optimizer]) -> None:
    """Register one of torch's classes under its lower-case name. Its options are its constructor's parameters."""
    name, help = make.__name__.lower(), f"as in torch.optim.{make.__name__}"
    listed = [parameter for parameter in inspect.signature(make).parameters.values() if parameter.name not in OURS]
    fields = [(parameter.name, *_kind(parameter, help)) for parameter in listed]
    namespace = {"make": make, "elementwise": name in STACKED, "__module__": __name__, "__doc__": f"{help}."}
    made = dataclasses.make_dataclass(make.__name__, fields, bases=(OfTorch,), namespace=namespace, frozen=True)
    OPTIMIZERS.register(name)(made)


def _kind(parameter: inspect.Parameter, help: str) -> tuple[Any, Any]:
    """Return the type and the field of an option."""
    if not isinstance(parameter.default, tuple):
        return parameter.annotation, option(parameter.default, help)
    numbers = all(isinstance(entry, int | float) for entry in parameter.default)
    return list[float] if numbers else list[Any], option([*parameter.default], help)


for _one in [one for one in vars(torch.optim).values() if isinstance(one, type)]:
    if issubclass(_one, torch.optim.Optimizer) and _one.__name__.lower() not in {"optimizer", "sgd", *UNFIT}:
        _file(_one)


def optimizer_section(training: TrainingConfig) -> Mapping[str, Any]:
    """Return the configured optimiser's section: name (default: sgd; lower-case for torch's) and options."""
    section = {"name": "sgd", **section_of(training.optimizer, WHERE, "{name: adamw}")}
    lower = str(section["name"]).lower()
    if lower in UNFIT:
        raise UserError(f"{WHERE}.name: '{section['name']}' {UNFIT[lower]}; choose another optimizer, such as adamw")
    if "lr" in section:
        raise UserError(f"{WHERE}.lr: set the learning rate in training.rate instead")
    return {**section, "name": lower} if OPTIMIZERS.shipped(lower) else section


def optimizer_of(training: TrainingConfig) -> Optimizer:
    """Return the configured optimiser. Raises UserError for an unknown optimiser or option."""
    return OPTIMIZERS.build(optimizer_section(training), WHERE)
