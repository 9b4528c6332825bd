"""What the convolutional networks have in common: their normalisation, and widths that an option scales."""

from collections.abc import Callable

from torch import nn

from fedloom.conf.errors import UserError


def _group(width: int, groups: int, affine: bool) -> list[nn.Module]:
    if width % groups:
        raise UserError(f"network.groups: got {groups}, takes a divisor of every width ({width} is one)")
    return [nn.GroupNorm(groups, width, affine=affine)]


def _batch(width: int, groups: int, affine: bool) -> list[nn.Module]:
    return [nn.BatchNorm2d(width, affine=affine)]


def _layer(width: int, groups: int, affine: bool) -> list[nn.Module]:
    return [nn.GroupNorm(1, width, affine=affine)]


def _instance(width: int, groups: int, affine: bool) -> list[nn.Module]:
    return [nn.InstanceNorm2d(width, affine=affine)]


def _none(width: int, groups: int, affine: bool) -> list[nn.Module]:
    return []


NORMS: dict[str, Callable[[int, int, bool], list[nn.Module]]] = {
    "group": _group, "batch": _batch, "layer": _layer, "instance": _instance, "none": _none
}  # fmt: skip
DIVISOR = 8  # of scaled widths: processors multiply vectors of so many channels
WIDTH_HELP = "all widths are multiplied by this and, unless it is 1, rounded to multiples of 8, at least 8"
HEAD_HELP = "the last layer, which gives the classes' scores, with a bias"
NORM_HELP = (
    "what follows a convolution: GroupNorm, BatchNorm, LayerNorm (of channels and places together), InstanceNorm or nothing"
)


def norm_layers(norm: str, width: int, groups: int, affine: bool = True) -> list[nn.Module]:
    """What follows a convolution with `width` outputs: one layer, or none. UserError if groups do not divide the width."""
    return NORMS[norm](width, groups, affine)


def scaled(step: int, width: float) -> int:
    """A layer's width times the option `width`: a multiple of 8, at least 8 and 90 % of the product (MobileNet's rule).

    With width=1 the layer's own, as published.
    """
    if width == 1.0:
        return step
    rounded = max(DIVISOR, int(step * width + DIVISOR / 2) // DIVISOR * DIVISOR)
    return rounded if rounded >= 0.9 * step * width else rounded + DIVISOR
