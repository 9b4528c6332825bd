"""Statistics of a network on a site's images, with which the server corrects it: means, which do not show single images.

All are means over the site's training examples. The mean over several sites, weighted by their numbers of images, is the
mean over all their images.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data import Examples, to_float
from fedloom.clients.evaluation.accuracy import image_batches
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.conf.errors import UserError
from fedloom.fusion.state import BATCH_NORM, State

MOMENTS = "moments"  # kinds of question, and the records of their answers
CLASS_STATISTICS = "class_statistics"
COUNT, SUM, SQUARE = "count", "sum", "square"
ROUNDING = 1e-3  # tolerance for rounding in float32 and fixed point
MEAN_OF, SQUARE_OF = "mean of ", "square of "


def linear_head(network: nn.Module) -> nn.Linear | None:
    """Return the network's head if it is one linear layer with a bias, which a discriminant can replace; else None."""
    head = getattr(network, "head", None)
    return head if isinstance(head, nn.Linear) and head.bias is not None else None


def running_norms(network: nn.Module) -> dict[str, Any]:
    """Return the BatchNorm layers with running statistics, by name."""
    return {name: module for name, module in network.named_modules()
            if isinstance(module, BATCH_NORM) and module.running_mean is not None}  # fmt: skip


@torch.no_grad()
def class_statistics(network: nn.Module, images: Examples, first: int, batch: int, device: torch.device) -> State:
    """Return class statistics of the head's inputs x [d], for a network in evaluation mode.

    They are float64 means over all images. `count` [classes]: share of images by class. `sum` [classes, d]: x of the class,
    0 for images of others. `square` [d, d]: x x^T. `first`: the output of the site's class 0.
    """
    if (head := linear_head(network)) is None:
        raise UserError("class statistics: the network's head must be one linear layer with a bias")
    count = torch.zeros(head.out_features, dtype=torch.float64)
    total = torch.zeros(head.out_features, head.in_features, dtype=torch.float64)
    square = torch.zeros(head.in_features, head.in_features, dtype=torch.float64)
    for pixels, labels in image_batches(images, batch):
        x = network.get_submodule("extractor")(to_float(pixels.to(device))).double().cpu()
        classes = labels.cpu() + first
        count.index_add_(0, classes, torch.ones(len(classes), dtype=torch.float64))
        total.index_add_(0, classes, x)
        square += x.T @ x
    return {COUNT: count / len(images), SUM: total / len(images), SQUARE: square / len(images)}


@torch.no_grad()
def moments(network: nn.Module, images: Examples, batch: int, device: torch.device) -> State:
    """Return the mean and the mean square of each channel of every BatchNorm's inputs, float64.

    Batches are normalised by their own statistics. The network's running statistics stay unchanged, and it is left in
    evaluation mode.
    """
    norms, sums = running_norms(network), dict[str, Tensor]()
    hooks = [norm.register_forward_pre_hook(_adding(name, sums)) for name, norm in norms.items()]
    for norm in norms.values():
        norm.training, norm.track_running_stats = True, False
    try:
        for pixels, _ in image_batches(images, batch):
            network(to_float(pixels.to(device)))
    finally:
        for norm, hook in zip(norms.values(), hooks, strict=True):
            norm.training, norm.track_running_stats = False, True
            hook.remove()
    return {name: tensor / len(images) for name, tensor in sums.items()}


def check_classes(state: State) -> None:
    """Raise ReplyError if a reply's class statistics contradict each other, as no images could."""
    count, total, square = (state[name].double() for name in (COUNT, SUM, SQUARE))
    if bool((count < -ROUNDING).any()) or abs(float(count.sum()) - 1.0) > ROUNDING:
        raise ReplyError(f"record '{CLASS_STATISTICS}': '{COUNT}' must be shares of images that add up to 1")
    size = square.diagonal().clamp(min=0.0).sum()
    if bool((square - square.T).abs().max() > ROUNDING * (1.0 + size)):
        raise ReplyError(f"record '{CLASS_STATISTICS}': '{SQUARE}' is not symmetric")
    if float(torch.linalg.eigvalsh(square)[0]) < -ROUNDING * (1.0 + float(size)):
        raise ReplyError(f"record '{CLASS_STATISTICS}': '{SQUARE}' is not positive semidefinite, as a sum of x x^T is")
    if bool((total.square().sum(1) > count.clamp(min=0.0) * size + ROUNDING * (1.0 + size)).any()):
        raise ReplyError(f"record '{CLASS_STATISTICS}': '{SUM}' is larger than '{COUNT}' and '{SQUARE}' allow")


def check_moments(state: State) -> None:
    """Raise ReplyError if a reply's mean is larger than the mean square allows."""
    for name in (name.removeprefix(MEAN_OF) for name in state if name.startswith(MEAN_OF)):
        mean, square = state[MEAN_OF + name], state[SQUARE_OF + name]
        if bool((mean.square() > square * (1.0 + ROUNDING) + ROUNDING).any()):
            raise ReplyError(f"record '{MOMENTS}': the mean of '{name}' is larger than its mean square allows")


CHECKS = {CLASS_STATISTICS: check_classes, MOMENTS: check_moments}


def _adding(name: str, sums: dict[str, Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        value = args[0].double()
        dims = [dim for dim in range(value.ndim) if dim != 1]
        for key, part in ((MEAN_OF + name, value), (SQUARE_OF + name, value.square())):
            total = part.mean(dim=dims).cpu() * len(value)
            sums[key] = sums[key] + total if key in sums else total

    return add
