"""Measure a network, at the server and at sites: right answers, and the sums of the configured metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedloom.clients.data import Examples, to_float
from fedloom.clients.evaluation.metrics import Metrics, Sums
from fedloom.clients.protocol.messages import BY_CLASS, TOTAL
from fedloom.conf.metrics import CLASS, TOKENS


@dataclass(frozen=True)
class Score:
    """Right answers on a number of images. `classes`: (right, images) by class number, if known.

    `sums`: those of the configured metrics, if accuracy is not the only one.
    """

    right: int
    images: int
    classes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    sums: Sums = field(default_factory=dict)


def pieces(number: int, most: int) -> int:
    """Return the number of batches, about equal in size and at most `most` each, for `number` images."""
    return max(1, -(-number // most))


def image_batches(images: Examples, most: int) -> list[tuple[Tensor, Tensor]]:
    """Divide images into batches of about equal size, at most `most` each: pixels and labels."""
    parts = pieces(len(images), most)
    return list(zip(images.x.tensor_split(parts), images.y.tensor_split(parts), strict=True))


def hits(network: nn.Module, images: Examples, batch: int, device: torch.device) -> Tensor:
    """Return whether the network, in evaluation mode, is right on each image: bool [n], on the device."""
    with torch.inference_mode():
        right = [
            network(to_float(pixels.to(device))).argmax(dim=1) == labels.to(device)
            for pixels, labels in image_batches(images, batch)
        ]
    return torch.cat(right)


def count_right(network: nn.Module, images: Examples, batch: int, device: torch.device) -> int:
    """Return how many of the images the network, in evaluation mode, classifies correctly."""
    return int(hits(network, images, batch, device).sum())


def answers(network: nn.Module, images: Examples, batch: int, device: torch.device) -> Tensor:
    """Return the raw outputs of a network in evaluation mode, float32 on the CPU, an entry for each image."""
    with torch.inference_mode():
        parts = [network(to_float(pixels.to(device))).float().cpu() for pixels, _ in image_batches(images, batch)]
    return torch.cat(parts).clone()


def score(network: nn.Module, images: Examples, batch: int, device: torch.device, metrics: Metrics | None = None) -> Score:
    """Measure a network in evaluation mode: right answers on all images and by class, and the sums of `metrics`."""
    if not len(images):
        return Score(0, 0)
    if metrics is None or metrics.only_accuracy:
        return _of_classes(images.y, hits(network, images, batch, device).cpu(), {})
    if metrics.kind == CLASS:
        scores = answers(network, images, batch, device)
        return _of_classes(images.y, scores.argmax(1) == images.y, metrics.sums(scores, images.y))
    most = batch if metrics.kind == TOKENS else len(images)  # the outputs of all tokens need too much memory
    parts = [Examples(x, y) for x, y in image_batches(images, most)]
    sums = [metrics.sums(answers(network, part, batch, device), part.y) for part in parts]
    return Score(0, len(images), sums=metrics.added(sums))


def _of_classes(labels: Tensor, right: Tensor, sums: Sums) -> Score:
    known, total = by_class(labels, right)
    classes = {name: (int(known[name]), int(total[name])) for name in total.nonzero().flatten().tolist()}
    return Score(int(known.sum()), len(labels), classes, sums)


def by_class(labels: Tensor, right: Tensor, classes: int = 0) -> tuple[Tensor, Tensor]:
    """Return the numbers of right answers and of images by class: two int64 [n], n >= `classes`. `right`: from `hits`."""
    total = torch.bincount(labels, minlength=classes)
    return torch.bincount(labels[right], minlength=len(total)), total


def score_numbers(scores: Mapping[str, Score], images: int, classes: bool) -> dict[str, int | float | list[int]]:
    """Convert scores by name, all on the same images, to the numbers of a reply. `classes`: also add those of each class."""
    numbers: dict[str, int | float | list[int]] = {**{name: score.right for name, score in scores.items()}, TOTAL: images}
    if classes and images and any(score.classes for score in scores.values()):
        size = 1 + max(name for score in scores.values() for name in score.classes)
        for name, score in scores.items():
            numbers[BY_CLASS + name] = [score.classes.get(number, (0, 0))[0] for number in range(size)]
            numbers[BY_CLASS + TOTAL] = [score.classes.get(number, (0, 0))[1] for number in range(size)]
    return numbers
