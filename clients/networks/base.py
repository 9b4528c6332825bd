"""The base classes of networks, their registry, and their initialisation from a generator."""

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.clients.data.form import ARRAY, FEATURES, IMAGE, SEQUENCE, TOKENS, Form
from fedloom.conf import machine
from fedloom.conf.errors import UserError
from fedloom.conf.package import NAME
from fedloom.conf.plugins import error_summary
from fedloom.conf.registry import Registry

EXTRACTOR, HEAD = "extractor.", "head."  # prefixes of the names of a state's tensors
NORMS = (nn.GroupNorm, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d)
PARTS = {"extractor": EXTRACTOR, "head": HEAD}
FITTING = {  # by kind of inputs: networks that take it
    IMAGE: "mlp, lenet, convnet, conv6, vgg11 to vgg19, resnet10 to resnet56, wide_resnet",
    FEATURES: "mlp",
    SEQUENCE: "lstm, transformer, cnn1d, mlp",
    TOKENS: "lstm, transformer, cnn1d",
    ARRAY: "mlp",
}


WEIGHT_OPTIONS = ("start", "freeze")  # options of every network (clients.networks.start)


class Network(nn.Module):
    """An extractor followed by a head: inputs [n, *form.shape] to [n, outputs], or [n, steps, outputs] (form.each_step).

    The names of its state's tensors start with `extractor.` or `head.`.
    """

    frozen: frozenset[str] = frozenset()  # names of tensors that the configuration freezes

    def __init__(self, extractor: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.extractor(inputs))


@dataclass(frozen=True)
class NetworkSpec(ABC):
    """Base class of a network's options: a frozen dataclass whose `build` makes the network."""

    @abstractmethod
    def build(self, form: Form) -> Network:
        """Build the network for inputs [n, *form.shape]. Raises UserError for a form or options that do not fit."""

    @property
    def constants(self) -> bool:
        """Whether modules may have constant tensors outside the state, which building without memory would lose."""
        return False

    def empty(self, form: Form) -> Network:
        """Build the network with undefined weights and no random draws: it is built without memory, then gets memory."""
        if self.constants:
            return self.build(form)
        try:
            with torch.device("meta"):
                network = self.build(form)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"network: {type(self).__name__}.build failed ({error_summary(error)})") from error
        if not isinstance(network, Network):
            built = f"{type(self).__name__}.build returned a {type(network).__name__}"
            raise UserError(f"network: {built}; it must return a fedloom.clients.networks.Network(extractor, head)")
        needed = sum(tensor.nbytes for tensor in network.state_dict().values())
        if needed > (available := _memory()):
            told_size = f"needs {needed / 2**30:.0f} GiB for its weights, but this machine has {available / 2**30:.0f} GiB"
            raise UserError(f"network: {told_size}; choose a narrower one, or reduce data.classes or data.size")
        return network._apply(_real)


@functools.cache
def _memory() -> int:
    """Return the machine's memory in bytes, read once: many networks are built."""
    return machine.memory()


def _real(tensor: Tensor) -> Tensor:
    """Allocate CPU memory for a tensor without any. (Module.to_empty would import torch's compiler, half a second.)"""
    return torch.empty(tensor.size(), dtype=tensor.dtype)


class Starting(ABC):
    """A module that changes its initial weights after `initialise` has drawn all weights of the network."""

    @abstractmethod
    def start(self) -> None:
        """Change the weights in place, without random draws."""


class SelfStarting(ABC):
    """A network whose own code draws its initial weights, instead of `initialise`."""

    @abstractmethod
    def restart(self, seed: int) -> None:
        """Draw all weights again in place, from the seed only."""


NETWORKS: Registry[NetworkSpec] = Registry("network", NetworkSpec, "fedloom.clients.networks", {
    "convnet": "convnet", "exits": "exits", "plain": "conv6 vgg11 vgg13 vgg16 vgg19", "small": "lenet mlp",
    "residual": "resnet10 resnet14 resnet18 resnet20 resnet22 resnet26 resnet34 resnet56 wide_resnet",
    "sequences": "cnn1d lstm", "split": "rest split", "transformer": "transformer",
}, adapter="own")  # fmt: skip


def register_variants(base: type[NetworkSpec], field: str, variants: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Register a subclass of `base` for each name: its description, and its value of the class attribute `field`."""
    for name, (about, value) in variants.items():
        facts = {"__doc__": about, "__module__": base.__module__, field: value}
        made = type("".join(map(str.title, name.split("_"))), (base,), facts)
        setattr(sys.modules[base.__module__], made.__name__, made)  # pickle looks for it there
        NETWORKS.register(name)(made)


def check_inputs(form: Form, name: str, *kinds: str) -> None:
    """Raise UserError, with the networks that fit, unless the inputs are of one of the kinds that a network takes."""
    if form.kind not in kinds:
        fault = f"network '{name}': takes inputs of the kind {' or '.join(kinds)}, but these are {form} (kind {form.kind})"
        raise UserError(f"{fault}; choose one of: {FITTING[form.kind]}, or module:Name")


def initialise(network: nn.Module, generator: torch.Generator) -> None:
    """Draw all weights from `generator`: He-normal convolutions (fan out), uniform +-1/sqrt(fan in) linear layers.

    Embeddings are standard normal; recurrent layers uniform +-1/sqrt(width); attention's inputs Glorot-uniform. Norm layers
    start at scale 1 and shift 0, BatchNorm's running statistics at mean 0 and variance 1. The draw depends only on the
    generator and the order of modules. A user's network (SelfStarting) draws its weights itself.
    """
    if isinstance(network, SelfStarting):
        network.restart(int(torch.randint(2**62, (), generator=generator)))
        return
    for module in network.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, NORMS):
            module.reset_parameters()
        else:
            _initialise_steps(module, generator)
    for module in network.modules():
        if isinstance(module, Starting):
            module.start()


def _initialise_steps(module: nn.Module, generator: torch.Generator) -> None:
    """Draw the weights of a layer for sequences: an embedding, a recurrent layer or attention's inputs."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, generator=generator)
    elif isinstance(module, nn.RNNBase):
        bound = module.hidden_size**-0.5
        for weight in module.parameters():
            nn.init.uniform_(weight, -bound, bound, generator=generator)
    elif isinstance(module, nn.MultiheadAttention):
        for weight in module.parameters(recurse=False):
            if weight.ndim > 1:
                nn.init.xavier_uniform_(weight, generator=generator)
            else:
                nn.init.zeros_(weight)


class Reused:
    """A network object for one site or model after another: its modules are as new each time, except their state.

    A user's module may store something in Python attributes, or in tensors outside its state (`persistent=False`). It would
    carry what one site's data left there into the next site's contribution, which forgetting could then not remove.

    Attributes:
        network: The network, as its last user left it.
    """

    def __init__(self, network: Network) -> None:
        self.network, self._made = network, None
        if _is_own(network):
            from fedloom.fusion.graph.undisturbed import Snapshot  # imported only for users' networks

            self._made = Snapshot(network, values=True)

    def as_new(self) -> Network:
        """Return the network, with the attributes that it had when it was built. Its user loads the state."""
        if self._made:
            self._made.restore()
        return self.network


def _is_own(network: Network) -> bool:
    """Return whether a network has parts that are neither of this project nor of torch."""
    homes = {type(module).__module__.partition(".")[0] for module in network.modules()}
    return isinstance(network, SelfStarting) or not homes <= {NAME, "torch"}


def frozen_in(network: nn.Module) -> frozenset[str]:
    """Return the names of the tensors that stay as they start: by network.freeze, or with requires_grad=False."""
    still = frozenset(name for name, parameter in network.named_parameters() if not parameter.requires_grad)
    return still | getattr(network, "frozen", frozenset())


def parameter_count(network: nn.Module) -> int:
    """Return the number of a network's parameters, counted by entry."""
    return sum(parameter.numel() for parameter in network.parameters())
