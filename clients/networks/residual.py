"""Residual networks (He et al. 2016, Sec. 4.2) and wide ones (Zagoruyko and Komodakis 2016) for small images.

A 3x3 convolution, stages of blocks with two 3x3 convolutions each, global average, linear head. Every stage except the
first halves the image. Without norms, each block would double the variance. There the last convolution of each branch
starts at 0, so each block starts as the identity (Fixup, Zhang et al. 2019).
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec, Starting, register_variants
from fedloom.clients.networks.layers import HEAD_HELP, NORM_HELP, NORMS, WIDTH_HELP, check_image, norm_layers, scaled
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option

VECTOR = 16  # most channels that an x86 processor multiplies at once


def _channels_first(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert the inputs to torch's standard memory layout.

    With few channels in channels-last layout, the gradient of such a layer corrupts the heap (oneDNN's issue 6035).
    """
    return tuple(images.contiguous() for images in inputs)


class Residual(nn.Module, Starting):
    """Base class of blocks: a branch and a shortcut around it. `zero`: the branch's last convolution starts at 0."""

    branch: nn.Sequential

    def __init__(self, zero: bool) -> None:
        super().__init__()
        self.zero = zero

    def start(self) -> None:
        if self.zero:
            last = [module for module in self.branch if isinstance(module, nn.Conv2d)][-1]
            nn.init.zeros_(last.weight)


class BasicBlock(Residual):
    """relu(branch(x) + shortcut(x)): [n, inputs, h, w] to [n, out, h / stride, w / stride].

    The shortcut is the identity (an empty nn.Sequential), or a 1x1 convolution and its norm where the shape changes.
    """

    def __init__(self, spec: "ResidualSpec", inputs: int, out: int, stride: int) -> None:
        super().__init__(zero=spec.norm == "none")
        self.branch = nn.Sequential(
            spec.convolution(inputs, out, stride), *spec.norms(out), nn.ReLU(), spec.convolution(out, out), *spec.norms(out)
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != out:
            self.shortcut = nn.Sequential(spec.convolution(inputs, out, stride, kernel=1), *spec.norms(out))
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        return self.relu(self.branch(images) + self.shortcut(images))


class PreActivationBlock(Residual):
    """branch(relu(norm(x))) + x: [n, inputs, h, w] to [n, out, h / stride, w / stride].

    Where the shape changes, a 1x1 convolution of relu(norm(x)) (`shortcut`) replaces x.
    """

    def __init__(self, spec: "ResidualSpec", inputs: int, out: int, stride: int) -> None:
        super().__init__(zero=spec.norm == "none")
        self.first = nn.Sequential(*spec.norms(inputs), nn.ReLU())
        self.branch = nn.Sequential(
            spec.convolution(inputs, out, stride), *spec.norms(out), nn.ReLU(), spec.convolution(out, out)
        )
        self.projects = stride != 1 or inputs != out
        self.shortcut = nn.Sequential()
        if self.projects:
            self.shortcut = nn.Sequential(spec.convolution(inputs, out, stride, kernel=1))

    def forward(self, images: Tensor) -> Tensor:
        active = self.first(images)
        return self.branch(active) + self.shortcut(active if self.projects else images)


@dataclass(frozen=True)
class ResidualSpec(NetworkSpec):
    """Options of all residual networks. Subclasses set the number of blocks and their widths."""

    width: float = option(1.0, WIDTH_HELP, low=0.01, high=16.0)
    norm: str = option("batch", NORM_HELP, choices=tuple(NORMS))
    groups: int = option(8, "groups of each GroupNorm", low=1)
    bias: bool = option(False, "convolutions with a bias")
    head_bias: bool = option(True, HEAD_HELP)

    def convolution(self, inputs: int, out: int, stride: int = 1, kernel: int = 3) -> nn.Conv2d:
        """Return a convolution from `inputs` to `out` channels, padded so that only the stride changes the image's size."""
        layer = nn.Conv2d(inputs, out, kernel, stride=stride, padding=kernel // 2, bias=self.bias)
        if kernel == 1 and stride > 1 and inputs < VECTOR:
            layer.register_forward_pre_hook(_channels_first)
        return layer

    def norms(self, out: int) -> list[nn.Module]:
        """Return the norm layer for `out` channels; empty with norm=none."""
        return norm_layers(self.norm, out, self.groups)

    def stages(
        self, block: Callable[["ResidualSpec", int, int, int], nn.Module], inputs: int, widths: list[int], blocks: list[int]
    ) -> OrderedDict[str, nn.Module]:
        """Return stage1, stage2, ... with `blocks[k]` blocks each. From stage2 on, the first block has stride 2."""
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        for number, (out, count) in enumerate(zip(widths, blocks, strict=True), start=1):
            layers = []
            for index in range(count):
                layers.append(block(self, inputs, out, 2 if index == 0 and number > 1 else 1))
                inputs = out
            stages[f"stage{number}"] = nn.Sequential(*layers)
        return stages


@dataclass(frozen=True)
class ResnetSpec(ResidualSpec):
    """Networks of basic blocks: `blocks[k]` blocks of width `widths[k]` in stage k."""

    widths: ClassVar[tuple[int, ...]] = (64, 128, 256, 512)
    blocks: ClassVar[tuple[int, ...]] = ()

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for widths that `groups` does not divide."""
        check_image(form, self)
        widths = [scaled(step, self.width) for step in self.widths]
        extractor = OrderedDict[str, nn.Module](
            stem=nn.Sequential(self.convolution(form.channels, widths[0]), *self.norms(widths[0]), nn.ReLU()),
            **self.stages(BasicBlock, widths[0], widths, list(self.blocks)),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
        )
        return Network(nn.Sequential(extractor), nn.Linear(widths[-1], form.outputs, bias=self.head_bias))


@dataclass(frozen=True)
class NarrowResnetSpec(ResnetSpec):
    """Networks of the CIFAR type, with three stages."""

    widths = (16, 32, 64)


register_variants(ResnetSpec, "blocks", {
    "resnet10": ("ResNet-10: one block per stage, 4.9 million parameters.", (1, 1, 1, 1)),
    "resnet14": ("ResNet-14: stages of 1, 2, 2 and 1 blocks, between ResNet-10 and ResNet-18.", (1, 2, 2, 1)),
    "resnet18": ("ResNet-18 with a 3x3 stem for small images: 11.2 million parameters.", (2, 2, 2, 2)),
    "resnet22": ("ResNet-22: stages of 2, 3, 3 and 2 blocks, between ResNet-18 and ResNet-26.", (2, 3, 3, 2)),
    "resnet26": ("ResNet-26: three blocks per stage, 17.4 million parameters.", (3, 3, 3, 3)),
    "resnet34": ("ResNet-34 with a 3x3 stem for small images: 21.3 million parameters.", (3, 4, 6, 3)),
})  # fmt: skip
register_variants(NarrowResnetSpec, "blocks", {
    "resnet20": ("ResNet-20 of the CIFAR type, widths 16-32-64: 270,000 parameters.", (3, 3, 3)),
    "resnet56": ("ResNet-56 of the CIFAR type, widths 16-32-64: 860,000 parameters.", (9, 9, 9)),
})  # fmt: skip


@NETWORKS.register("wide_resnet")
@dataclass(frozen=True)
class WideResnet(ResidualSpec):
    """A wide residual network with pre-activation: depth = 6 n + 4, widths 16, then (16, 32, 64) times `widen`."""

    depth: int = option(16, "number of layers: 6 n + 4, for n blocks in each of three stages", low=10)
    widen: int = option(4, "factor of the three stages' widths", low=1)

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for an invalid width or depth."""
        check_image(form, self)
        if self.depth % 6 != 4:
            raise UserError(f"network.depth: got {self.depth}, takes 6 n + 4 (10, 16, 22, 28, ...)")
        stem = scaled(16, self.width)
        widths = [scaled(step * self.widen, self.width) for step in (16, 32, 64)]
        extractor = OrderedDict[str, nn.Module](
            stem=self.convolution(form.channels, stem),
            **self.stages(PreActivationBlock, stem, widths, 3 * [(self.depth - 4) // 6]),
            last=nn.Sequential(*self.norms(widths[-1]), nn.ReLU()),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
        )
        return Network(nn.Sequential(extractor), nn.Linear(widths[-1], form.outputs, bias=self.head_bias))
