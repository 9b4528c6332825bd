"""What a network is here, the registry of networks, and their initialisation from a generator."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.conf import machine
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import told
from fedloom.conf.registry import Registry

EXTRACTOR, HEAD = "extractor.", "head."  # what the names of a state's tensors begin with
PARTS = {"extractor": EXTRACTOR, "head": HEAD}


class Network(nn.Module):
    """extractor, then head: [n, c, h, w] images to [n, classes] logits.

    Its state's names start with `extractor.` or `head.`.
    """

    def __init__(self, extractor: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.extractor(images))


@dataclass(frozen=True)
class NetworkSpec(ABC):
    """The options of one family of networks; `build` makes the network."""

    @abstractmethod
    def build(self, channels: int, size: int, classes: int) -> Network:
        """The network for [n, channels, size, size] images; raises UserError if the options do not fit."""

    @property
    def constants(self) -> bool:
        """Whether its modules may hold constants, which a network that is built without memory would lose."""
        return False

    def empty(self, channels: int, size: int, classes: int) -> Network:
        """The same with undefined weights, built without memory first so that no random numbers are drawn."""
        if self.constants:
            return self.build(channels, size, classes)
        try:
            with torch.device("meta"):
                network = self.build(channels, size, classes)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"network: {type(self).__name__}.build failed ({told(error)})") from error
        if not isinstance(network, Network):
            built = f"{type(self).__name__}.build gave a {type(network).__name__}"
            raise UserError(f"network: {built}, takes a fedloom.clients.networks.Network(extractor, head)")
        needed = sum(tensor.nbytes for tensor in network.state_dict().values())
        if needed > (there := machine.memory()):
            told_size = f"needs {needed / 2**30:.0f} GiB for its weights, and this machine has {there / 2**30:.0f} GiB"
            raise UserError(f"network: {told_size}; make it narrower, or data.classes and data.size smaller")
        return network._apply(_real)


def _real(tensor: Tensor) -> Tensor:
    """Memory on the CPU for a tensor that has none. (Module.to_empty would import torch's compiler, half a second.)"""
    return torch.empty(tensor.size(), dtype=tensor.dtype)


class Starting(ABC):
    """A part of a network that changes its own layers' start once `initialise` has drawn them all."""

    @abstractmethod
    def start(self) -> None:
        """Change the weights in place; draws nothing."""


class SelfStarting(ABC):
    """A network whose own code draws its weights."""

    @abstractmethod
    def restart(self, seed: int) -> None:
        """Draw all weights again, in place, from the seed alone."""


NETWORKS: Registry[NetworkSpec] = Registry("network", NetworkSpec, "fedloom.clients.networks", {
    "convnet": "convnet", "exits": "exits", "plain": "conv6 vgg11 vgg13 vgg16 vgg19", "small": "lenet mlp",
    "residual": "resnet10 resnet14 resnet18 resnet20 resnet22 resnet26 resnet34 resnet56 wide_resnet", "split": "rest split",
}, adapter="own")  # fmt: skip


def initialise(network: nn.Module, generator: torch.Generator) -> None:
    """Draw all weights from `generator`: He-normal convolutions (fan out), uniform +-1/sqrt(fan in) linear layers.

    Norm layers start at scale 1 and shift 0, BatchNorm's running statistics at mean 0 and variance 1. The draw depends on
    nothing but the generator and the order of modules. A network of the user's own (SelfStarting) draws them itself.
    """
    if isinstance(network, SelfStarting):
        network.restart(int(torch.randint(2**62, (), generator=generator)))
        return
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, nn.GroupNorm | nn.BatchNorm1d | nn.BatchNorm2d | nn.InstanceNorm2d):
            module.reset_parameters()
    for module in network.modules():
        if isinstance(module, Starting):
            module.start()


def parameter_count(network: nn.Module) -> int:
    """The number of trainable parameters."""
    return sum(parameter.numel() for parameter in network.parameters())
