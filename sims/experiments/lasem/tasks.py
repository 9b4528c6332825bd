"""Sequences of tasks (Lee et al. 2021, Sec. 2 and 4), with few images of few classes each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.data import Examples
from fedloom.conf.randomness import torch_generator
from fedloom.sims.operations.domain_task import Task as Domain
from fedloom.sims.operations.domain_task import images

LEVELS = (-2, -1, 0, 1)  # of the noise's mean, in units of UNIT; its standard deviation is 0 or 1 unit
UNIT = 0.025 * 255
DIGITS = ("mnist", "usps", "mnist_m")


@dataclass(frozen=True)
class Task:
    """The images of one task.

    Attributes:
        name: Its name.
        train: Training examples.
        validation: Validation examples.
        test: Test examples.
        classes: The number of classes. Labels count from 0.
    """

    name: str
    train: Examples
    validation: Examples
    test: Examples
    classes: int


def cifar100(size: int, number: int, seed: int) -> list[Task]:
    """Return `number` tasks of 10 disjoint classes, with 17 training and 3 validation examples of each class.

    From the 11th task on, the classes are drawn again. The paper does not say how it draws its 40 tasks.
    """
    tasks = []
    for index in range(number):
        turn, first = divmod(index * 10, 100)
        order = torch.randperm(100, generator=torch_generator(turn, "classes")) if turn else torch.arange(100)
        classes = order[first : first + 10].tolist()
        tasks.append(_task("cifar100", size, classes, (17, 3), 100, f"cifar100 {index}", seed))
    return tasks


def digits(size: int, number: int, seed: int) -> list[Task]:
    """Return `number` tasks by the paper's recipe for STL-10: three classes of one domain of digits.

    Each class has 106 training and 19 validation examples. All images have Gaussian noise with the task's mean and
    deviation, and the task's order of colours.
    """
    tasks = []
    for index in range(number):
        draw = torch_generator(seed, "digits", str(index))
        classes = torch.randperm(10, generator=draw)[:3].tolist()
        look = _Look(draw)
        plain = _task(DIGITS[index % len(DIGITS)], size, classes, (106, 19), 150, f"digits {index}", seed)
        tasks.append(Task(plain.name, look(plain.train), look(plain.validation), look(plain.test), plain.classes))
    return tasks


class _Look:
    def __init__(self, draw: torch.Generator) -> None:
        self.mean, self.deviation = (
            LEVELS[int(torch.randint(4, (), generator=draw))],
            int(torch.randint(2, (), generator=draw)),
        )
        self.colours, self.draw = torch.randperm(3, generator=draw), draw

    def __call__(self, images: Examples) -> Examples:
        noise = torch.randn(images.x.shape, generator=self.draw) * self.deviation + self.mean
        return Examples((images.x[:, self.colours] + UNIT * noise).clamp(0, 255).round().to(torch.uint8), images.y)


SEQUENCES: dict[str, Callable[[int, int, int], Sequence[Task]]] = {"cifar100": cifar100, "digits": digits}
"""Functions of the image size, the number of tasks and the seed, by name."""


def _task(domain: str, size: int, classes: Sequence[int], numbers: tuple[int, int], most: int, name: str, seed: int) -> Task:
    """Return a task of these classes, with `numbers` of training and validation examples of each, and at most `most` test
    images."""
    every, test = (images(Domain(domain, size, False), part) for part in ("train", "test"))
    by_class = [_shuffled(every.y, label, torch_generator(seed, name, str(label))) for label in classes]
    train, validation = numbers
    return Task(
        name,
        _chosen(every, [indices[:train] for indices in by_class]),
        _chosen(every, [indices[train : train + validation] for indices in by_class]),
        _chosen(test, [_shuffled(test.y, label, torch_generator(0, name))[:most] for label in classes]),
        len(classes),
    )


def _shuffled(labels: Tensor, label: int, generator: torch.Generator) -> Tensor:
    indices = torch.nonzero(labels == label).flatten()
    return indices[torch.randperm(len(indices), generator=generator)]


def _chosen(every: Examples, by_class: Sequence[Tensor]) -> Examples:
    labels = torch.cat([torch.full_like(indices, number) for number, indices in enumerate(by_class)])
    return Examples(every.x[torch.cat(list(by_class))], labels)
