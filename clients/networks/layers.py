"""Parts that the convolutional networks share: norm layers, and widths scaled by an option."""

from collections.abc import Callable

from torch import nn

from fedloom.clients.data.form import IMAGE, Form
from fedloom.clients.networks.base import NETWORKS, NetworkSpec, check_inputs
from fedloom.conf.errors import UserError


def _group(width: int, groups: int, affine: bool) -> list[nn.Module]:
    if width % groups:
        raise UserError(f"network.groups: got {groups}, takes a number that divides every width, such as {width}")
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
DIVISOR = 8  # divides scaled widths: processors multiply vectors of this many channels
WIDTH_HELP = "factor of all widths; unless it is 1, widths are rounded to multiples of 8, at least 8"
HEAD_HELP = "a bias in the last layer, which computes the classes' scores"
NORM_HELP = (
    "norm after each convolution: GroupNorm, BatchNorm, LayerNorm (over channels and positions), InstanceNorm or none"
)


def check_image(form: Form, spec: NetworkSpec, least: int = 1) -> None:
    """Raise UserError unless the inputs are images of at least `least` pixels in height and width."""
    check_inputs(form, NETWORKS.name_of(spec), IMAGE)
    if min(form.height, form.width) < least:
        got = form.height if form.height == form.width else f"{form.height} x {form.width}"
        raise UserError(f"data.size: got {got}, takes at least {least} for this network")


def norm_layers(norm: str, width: int, groups: int, affine: bool = True) -> list[nn.Module]:
    """Return a list of the norm layer for `width` channels, or an empty list for norm=none.

    Raises UserError if `groups` does not divide the width.
    """
    return NORMS[norm](width, groups, affine)


def scaled(step: int, width: float) -> int:
    """Multiply a layer's width `step` by `width` and round to a multiple of 8, by MobileNet's rule.

    The result is at least 8, and at least 90% of the product. With width=1 it is `step`.
    """
    if width == 1.0:
        return step
    rounded = max(DIVISOR, int(step * width + DIVISOR / 2) // DIVISOR * DIVISOR)
    return rounded if rounded >= 0.9 * step * width else rounded + DIVISOR
