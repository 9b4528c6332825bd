"""Plain convolutional networks: 3x3 convolutions with a norm, max-pooling, global average, linear head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec, register_variants
from fedloom.clients.networks.layers import HEAD_HELP, NORM_HELP, NORMS, WIDTH_HELP, check_image, norm_layers, scaled
from fedloom.conf.typed import option

POOL = 0  # in a layout: a 2x2 max-pooling instead of a convolution


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose effective weights have mean 0 and variance 1 / fan_in in each output channel.

    Weight standardisation (Qiao et al. 2019, Eq. 2-3). Scaling the weights changes nothing, so the sum of n networks and
    their mean are the same function.
    """

    def forward(self, input: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, correction=0)
        fan_in = self.weight[0].numel()
        return self._conv_forward(input, (self.weight - mean) * torch.rsqrt(variance * fan_in + 1e-12), self.bias)


@dataclass(frozen=True)
class PlainSpec(NetworkSpec):
    """Options of the plain networks. `layout`: in order, the width of each convolution, or POOL for a max-pooling."""

    layout: ClassVar[tuple[int, ...]] = ()

    width: float = option(1.0, WIDTH_HELP, low=0.01, high=16.0)
    groups: int = option(32, "groups of each GroupNorm", low=1)
    standardise: bool = option(False, "weight standardisation in every convolution")
    affine: bool = option(True, "norm layers with a learned scale and shift")
    norm: str = option("group", NORM_HELP, choices=tuple(NORMS))
    bias: bool = option(False, "convolutions with a bias")
    head_bias: bool = option(True, HEAD_HELP)

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for widths that `groups` does not divide."""
        check_image(form, self, least=1 << self.layout.count(POOL))
        convolution = StandardisedConv2d if self.standardise else nn.Conv2d
        channels, layers = form.channels, list[nn.Module]()
        for step in self.layout:
            if step == POOL:
                layers.append(nn.MaxPool2d(2))
                continue
            out = scaled(step, self.width)
            layers.append(convolution(channels, out, 3, padding=1, bias=self.bias))
            layers += norm_layers(self.norm, out, self.groups, self.affine)
            layers.append(nn.ReLU(inplace=True))
            channels = out
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return Network(nn.Sequential(*layers), nn.Linear(channels, form.outputs, bias=self.head_bias))


@NETWORKS.register("conv6")
@dataclass(frozen=True)
class Conv6(PlainSpec):
    """Six convolutions 16-16-32-32-64-64, pooling after the first, third and fifth: 72,000 parameters."""

    layout = (16, POOL, 16, 32, POOL, 32, 64, POOL, 64)
    groups: int = option(4, "groups of each GroupNorm", low=1)


register_variants(PlainSpec, "layout", {
    "vgg11": ("VGG configuration A with GroupNorm (or another norm) and a linear head.",
              (64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL)),
    "vgg13": ("VGG configuration B with GroupNorm (or another norm) and a linear head.",
              (64, 64, POOL, 128, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL)),
    "vgg16": ("VGG configuration D with GroupNorm (32 groups) and a linear head, as in sum aggregation, Sec. 4.",
              (64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512, POOL)),
    "vgg19": ("VGG configuration E with GroupNorm (or another norm) and a linear head.",
              (64, 64, POOL, 128, 128, POOL, *(256, 256, 256, 256, POOL), *2 * (512, 512, 512, 512, POOL))),
})  # fmt: skip
