"""A network with classifiers after several blocks (BranchyNet, Teerapittayanon et al. 2016), or its first part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec
from fedloom.clients.networks.residual import Residual
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option


class ExitNetwork(Network):
    """Successive parts, each followed by a classifier: inputs [n, ...] to the mean of all logits, [n, outputs]."""

    def __init__(self, parts: Sequence[nn.Module], classifiers: Sequence[nn.Module]) -> None:
        super().__init__(nn.ModuleList(parts), nn.ModuleList(classifiers))

    def forward(self, inputs: Tensor, each: bool = False) -> Tensor:
        """Return the mean logits, or (`each`) those of every classifier, [classifiers, n, outputs]."""
        logits = []
        for part, classifier in zip(self.extractor.children(), self.head.children(), strict=True):
            inputs = part(inputs)
            logits.append(classifier(inputs))
        return torch.stack(logits) if each else torch.stack(logits).mean(0)


@NETWORKS.register("exits")
@dataclass(frozen=True)
class Exits(NetworkSpec):
    """Another network with linear classifiers after some of its blocks. On images, a global average comes first.

    Blocks are the residual blocks or, in other networks, convolutions and hidden layers with the layers that follow them. A
    network of smaller `depth` has the first tensors of a larger one, by name and shape.
    """

    of: dict[str, Any] = option({"name": "mlp"}, "the network: name and options", named=True)
    after: list[int] = option([], "numbers of the blocks, from 1, that a classifier follows; empty: all", low=1)
    depth: int = option(0, "number of these classifiers; blocks after the last one are left out; 0: all", low=0)

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for a network without blocks, or a wrong `after` or `depth`."""
        blocks = _blocks(NETWORKS.build(self.of, "network.of").build(form).extractor)
        if not blocks:
            raise UserError(f"network.of: '{self.of['name']}' is not a chain of layers and blocks")
        numbers = self.after or list(range(1, len(blocks) + 1))
        if any(number >= following for number, following in pairwise(numbers)) or numbers[-1] > len(blocks):
            raise UserError(f"network.after: got {numbers}, takes rising numbers of its blocks, from 1 to {len(blocks)}")
        if self.depth > len(numbers):
            raise UserError(
                f"network.depth: got {self.depth}, takes at most {len(numbers)}, the number of blocks in network.after"
            )
        ends = numbers[: self.depth or len(numbers)]
        parts = [
            nn.Sequential(*(layer for block in blocks[begin:end] for layer in block)) for begin, end in pairwise([0, *ends])
        ]
        return ExitNetwork(parts, _classifiers(parts, form.zeros(1), form.outputs))


def _blocks(extractor: nn.Module) -> list[list[nn.Module]]:
    """Return the layers of each block. Layers before the first block belong to it."""
    steps = list(_steps(extractor))
    kind = Residual if any(isinstance(step, Residual) for step in steps) else (nn.Conv2d, nn.Linear)
    starts = [index for index, step in enumerate(steps) if isinstance(step, kind)]
    return [steps[begin:end] for begin, end in pairwise([0, *starts[1:], len(steps)])] if starts else []


def _steps(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers and blocks of nested sequences, in order."""
    for child in module.children() if isinstance(module, nn.Sequential) else ():
        if isinstance(child, nn.Sequential):
            yield from _steps(child)
        else:
            yield child


def _classifiers(parts: Sequence[nn.Module], inputs: Tensor, outputs: int) -> list[nn.Module]:
    """Return a classifier for the outputs of each part, whose shapes come from these inputs."""
    classifiers: list[nn.Module] = []
    for part in parts:
        inputs = part.eval()(inputs)
        part.train()
        linear = nn.Linear(inputs.shape[1], outputs)
        classifiers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear) if inputs.ndim == 4 else linear)
    return classifiers
