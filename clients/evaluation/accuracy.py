"""Count right answers, at the server and at sites."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedloom.clients.data import Images, to_float
from fedloom.clients.protocol.messages import BY_CLASS, TOTAL


@dataclass(frozen=True)
class Score:
    """Right answers on a number of images. `classes`: (right, images) by class number, if known."""

    right: int
    images: int
    classes: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def pieces(number: int, most: int) -> int:
    """Return the number of batches, about equal in size and at most `most` each, for `number` images."""
    return max(1, -(-number // most))


def hits(network: nn.Module, images: Images, batch: int, device: torch.device) -> Tensor:
    """Return whether the network, in evaluation mode, is right on each image: bool [n], on the device."""
    parts = pieces(len(images), batch)
    with torch.inference_mode():
        found = [
            network(to_float(pixels.to(device))).argmax(dim=1) == labels.to(device)
            for pixels, labels in zip(images.x.tensor_split(parts), images.y.tensor_split(parts), strict=True)
        ]
    return torch.cat(found)


def count_right(network: nn.Module, images: Images, batch: int, device: torch.device) -> int:
    """Return how many of the images the network, in evaluation mode, classifies correctly."""
    return int(hits(network, images, batch, device).sum())


def score(network: nn.Module, images: Images, batch: int, device: torch.device) -> Score:
    """Score the network, in evaluation mode, on all images and by class."""
    if not len(images):
        return Score(0, 0)
    right, total = by_class(images.y, hits(network, images, batch, device).cpu())
    classes = {name: (int(right[name]), int(total[name])) for name in total.nonzero().flatten().tolist()}
    return Score(int(right.sum()), len(images), classes)


def by_class(labels: Tensor, right: Tensor, classes: int = 0) -> tuple[Tensor, Tensor]:
    """Return the number of right answers and of images by class: two int64 [n], with n at least `classes`."""
    total = torch.bincount(labels, minlength=classes)
    return torch.bincount(labels[right], minlength=len(total)), total


def score_numbers(scores: Mapping[str, Score], images: int, classes: bool) -> dict[str, int | float | list[int]]:
    """Convert scores on the same images to the numbers of a reply; `classes`: with those of each class."""
    found: dict[str, int | float | list[int]] = {**{name: one.right for name, one in scores.items()}, TOTAL: images}
    if classes and images:
        size = 1 + max(name for one in scores.values() for name in one.classes)
        for name, one in scores.items():
            found[BY_CLASS + name] = [one.classes.get(place, (0, 0))[0] for place in range(size)]
            found[BY_CLASS + TOTAL] = [one.classes.get(place, (0, 0))[1] for place in range(size)]
    return found
