"""What a site tells of a network on its own images, so that the server can set it right: means, of which no image follows.

All are means over the site's training images: those of several sites, weighted by their numbers of images, are those of all
their images together.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data import Images, to_float
from fedloom.clients.evaluation.accuracy import pieces
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.conf.errors import UserError
from fedloom.fusion.state import BATCH_NORM, State

MOMENTS = "moments"  # kinds of question, and the records of their answers
CLASS_STATISTICS = "class_statistics"
COUNT, SUM, SQUARE = "count", "sum", "square"
ROUNDING = 1e-3  # what float32 and fixed point may lose of these sums
MEAN_OF, SQUARE_OF = "mean of ", "square of "


def linear_head(network: nn.Module) -> nn.Linear | None:
    """The network's last layer; None if it is none that a discriminant can take the place of."""
    head = getattr(network, "head", None)
    return head if isinstance(head, nn.Linear) and head.bias is not None else None


def running_norms(network: nn.Module) -> dict[str, Any]:
    """The BatchNorms that keep statistics, by name."""
    return {name: module for name, module in network.named_modules()
            if isinstance(module, BATCH_NORM) and module.running_mean is not None}  # fmt: skip


@torch.no_grad()
def class_statistics(network: nn.Module, images: Images, first: int, batch: int, device: torch.device) -> State:
    """Of the head's inputs x [d]: by class the share of images and the mean of x, 0 for others; the mean of x x^T.

    {count: [classes], sum: [classes, d], square: [d, d]}, float64. `first`: the output of the site's class 0. The network is
    in evaluation mode.
    """
    if (head := linear_head(network)) is None:
        raise UserError("class statistics: takes networks whose head is one linear layer with a bias")
    count = torch.zeros(head.out_features, dtype=torch.float64)
    total = torch.zeros(head.out_features, head.in_features, dtype=torch.float64)
    square = torch.zeros(head.in_features, head.in_features, dtype=torch.float64)
    for pixels, labels in _batches(images, batch):
        x = network.get_submodule("extractor")(to_float(pixels.to(device))).double().cpu()
        places = labels.cpu() + first
        count.index_add_(0, places, torch.ones(len(places), dtype=torch.float64))
        total.index_add_(0, places, x)
        square += x.T @ x
    return {COUNT: count / len(images), SUM: total / len(images), SQUARE: square / len(images)}


@torch.no_grad()
def moments(network: nn.Module, images: Images, batch: int, device: torch.device) -> State:
    """Of every BatchNorm's inputs the mean and the mean square of each channel, float64.

    Batches are normalised by their own statistics. The network is left in evaluation mode, its statistics as they were.
    """
    norms, sums = running_norms(network), dict[str, Tensor]()
    hooks = [norm.register_forward_pre_hook(_adding(name, sums)) for name, norm in norms.items()]
    for norm in norms.values():
        norm.training, norm.track_running_stats = True, False
    try:
        for pixels, _ in _batches(images, batch):
            network(to_float(pixels.to(device)))
    finally:
        for norm, hook in zip(norms.values(), hooks, strict=True):
            norm.training, norm.track_running_stats = False, True
            hook.remove()
    return {name: tensor / len(images) for name, tensor in sums.items()}


def check_classes(given: State) -> None:
    """Raises ReplyError for class statistics that no images have."""
    count, total, square = (given[name].double() for name in (COUNT, SUM, SQUARE))
    if bool((count < -ROUNDING).any()) or abs(float(count.sum()) - 1.0) > ROUNDING:
        raise ReplyError(f"record '{CLASS_STATISTICS}': '{COUNT}' are no shares of images, which add up to 1")
    size = square.diagonal().clamp(min=0.0).sum()
    if bool((square - square.T).abs().max() > ROUNDING * (1.0 + size)):
        raise ReplyError(f"record '{CLASS_STATISTICS}': '{SQUARE}' is not symmetric")
    if float(torch.linalg.eigvalsh(square)[0]) < -ROUNDING * (1.0 + float(size)):
        raise ReplyError(f"record '{CLASS_STATISTICS}': '{SQUARE}' is no sum of products of features")
    if bool((total.square().sum(1) > count.clamp(min=0.0) * size + ROUNDING * (1.0 + size)).any()):
        raise ReplyError(f"record '{CLASS_STATISTICS}': '{SUM}' is larger than '{COUNT}' and '{SQUARE}' allow")


def check_moments(given: State) -> None:
    """Raises ReplyError for moments that no images have."""
    for name in (name.removeprefix(MEAN_OF) for name in given if name.startswith(MEAN_OF)):
        mean, square = given[MEAN_OF + name], given[SQUARE_OF + name]
        if bool((mean.square() > square * (1.0 + ROUNDING) + ROUNDING).any()):
            raise ReplyError(f"record '{MOMENTS}': the mean of '{name}' is larger than its mean square allows")


CHECKS = {CLASS_STATISTICS: check_classes, MOMENTS: check_moments}


def _batches(images: Images, batch: int) -> list[tuple[Tensor, Tensor]]:
    parts = pieces(len(images), batch)
    return list(zip(images.x.tensor_split(parts), images.y.tensor_split(parts), strict=True))


def _adding(name: str, sums: dict[str, Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        value = args[0].double()
        dims = [dim for dim in range(value.ndim) if dim != 1]
        for key, part in ((MEAN_OF + name, value), (SQUARE_OF + name, value.square())):
            found = part.mean(dim=dims).cpu() * len(value)
            sums[key] = sums[key] + found if key in sums else found

    return add
