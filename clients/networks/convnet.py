"""A chain of 3x3 convolutions with options for widths, strides and poolings. It can also be a head."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec
from fedloom.clients.networks.layers import HEAD_HELP, NORM_HELP, NORMS, check_image, norm_layers
from fedloom.clients.networks.small import hidden
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option


@NETWORKS.register("convnet")
@dataclass(frozen=True)
class Convnet(NetworkSpec):
    """Blocks of a 3x3 convolution, a norm and ReLU; then a global average, or hidden layers; a linear head."""

    widths: list[int] = option([16, 32, 64], "output channels of the blocks", low=1)
    strides: list[int] = option([], "strides of the blocks: 2 halves the image; empty: all 1", low=1, high=4)
    pools: list[int] = option([], "numbers of the blocks that end with a 2x2 max-pooling", low=1)
    hidden: list[int] = option([], "widths of fully connected layers with ReLU; empty: a global average instead", low=1)
    dropout: float = option(0.0, "share of the hidden layers' outputs that training sets to 0", low=0.0, high=0.99)
    norm: str = option("batch", NORM_HELP, choices=tuple(NORMS))
    groups: int = option(8, "groups of each GroupNorm", low=1)
    bias: bool = option(False, "convolutions with a bias")
    head_bias: bool = option(True, HEAD_HELP)

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for strides or pools that do not fit the widths."""
        check_image(form, self)
        strides = self.strides or [1] * len(self.widths)
        if not self.widths or len(strides) != len(self.widths):
            raise UserError(
                f"network.strides: got {len(self.strides)} strides, takes one for each of the {len(self.widths)} widths"
            )
        if wrong := next((block for block in self.pools if block > len(self.widths)), 0):
            raise UserError(f"network.pools: got {wrong}, but there are {len(self.widths)} blocks")
        blocks, channels, sides = OrderedDict[str, nn.Module](), form.channels, [form.height, form.width]
        for number, (out, stride) in enumerate(zip(self.widths, strides, strict=True), start=1):
            convolution = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=self.bias)
            pool = [nn.MaxPool2d(2)] if number in self.pools else []
            blocks[f"block{number}"] = nn.Sequential(
                convolution, *norm_layers(self.norm, out, self.groups), nn.ReLU(), *pool
            )
            channels, sides = out, [((side - 1) // stride + 1) // (2 if pool else 1) for side in sides]
        if min(sides) < 1:
            got = form.height if form.height == form.width else f"{form.height} x {form.width}"
            raise UserError(f"data.size: got {got}, too small for the network's poolings")
        if not self.hidden:
            blocks |= {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
            return Network(nn.Sequential(blocks), nn.Linear(channels, form.outputs, bias=self.head_bias))
        layers = hidden(channels * sides[0] * sides[1], self.hidden, True)
        if self.dropout:
            layers = [
                expanded
                for layer in layers
                for expanded in ([layer, nn.Dropout(self.dropout)] if isinstance(layer, nn.ReLU) else [layer])
            ]
        blocks |= {"flat": nn.Flatten(), "hidden": nn.Sequential(*layers)}
        return Network(nn.Sequential(blocks), nn.Linear(self.hidden[-1], form.outputs, bias=self.head_bias))
