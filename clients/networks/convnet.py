"""A chain of 3x3 convolutions whose widths and strides are options, and which can be a head as well as a whole network."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from clients.networks.base import NETWORKS, Network, NetworkSpec
from clients.networks.layers import NORM_HELP, NORMS, norm_layers
from conf.errors import UserError
from conf.typed import value


@NETWORKS.register("convnet")
@dataclass(frozen=True)
class Convnet(NetworkSpec):
    """block1, block2, ...: a 3x3 convolution, a norm and ReLU each; global average, linear head."""

    widths: list[int] = value([16, 32, 64], "output channels of the blocks", low=1)
    strides: list[int] = value([], "of the blocks: 2 halves the image; empty: all 1", low=1, high=4)
    norm: str = value("batch", NORM_HELP, choices=tuple(NORMS))
    groups: int = value(8, "groups of each GroupNorm", low=1)
    bias: bool = value(False, "convolutions with a bias")

    def build(self, channels: int, size: int, classes: int) -> Network:
        """The network for [n, channels, size, size] images; UserError for strides that are not as many as widths."""
        strides = self.strides or [1] * len(self.widths)
        if not self.widths or len(strides) != len(self.widths):
            raise UserError(f"network.strides: got {len(self.strides)}, takes one for each of the {len(self.widths)} widths")
        blocks = OrderedDict[str, nn.Module]()
        for number, (out, stride) in enumerate(zip(self.widths, strides, strict=True), start=1):
            convolution = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=self.bias)
            blocks[f"block{number}"] = nn.Sequential(convolution, *norm_layers(self.norm, out, self.groups), nn.ReLU())
            channels = out
        blocks |= {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
        return Network(nn.Sequential(blocks), nn.Linear(channels, classes))
