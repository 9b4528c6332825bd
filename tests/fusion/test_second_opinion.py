"""Torch-Pruning's dependency graph (Fang et al. 2023) as a second opinion: which dimensions of weights belong together."""

from typing import Any

import pytest
import torch
from torch import nn

from fedloom.fusion.graph.channels import wire
from tests.fusion.families import SMALL, filled, images

pruning: Any = pytest.importorskip("torch_pruning")

NAMES = ["vgg_bn", "resnet", "wide_resnet", "densenet", "squeezenet", "mobilenet_v2", "mobilenet_v3", "efficientnet",
         "convnext", "googlenet", "mnasnet"]  # fmt: skip


def theirs(network: nn.Module, example: torch.Tensor) -> dict[tuple[str, int, int], frozenset[tuple[str, int, int]]]:
    """For each output channel of a convolution or linear layer all (weight, dimension, entry) that are pruned with it."""
    graph = pruning.DependencyGraph().build_dependency(network, example)
    names = {module: name for name, module in network.named_modules()}
    found = {}
    for name, module in network.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups > 1):
            continue
        for channel in (0, module.weight.shape[0] - 1):
            kind = pruning.prune_conv_out_channels if isinstance(module, nn.Conv2d) else pruning.prune_linear_out_channels
            group = graph.get_pruning_group(module, kind, idxs=[channel])
            places = set()
            for dependency, entries in group:
                target = dependency.target.module
                if target in names and isinstance(target, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
                    reads = "in_channels" in dependency.handler.__name__ and getattr(target, "groups", 1) == 1
                    places |= {(f"{names[target]}.weight", int(reads), int(entry)) for entry in entries}
            found[f"{name}.weight", 0, channel] = frozenset(places)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_same_entries_belong_together(name):
    size, build = SMALL[name]
    network = filled(build(), dtype=torch.float32)
    example = images(size, 1, torch.float32)
    wiring = wire(network, example)
    plain = {f"{path}.weight" for path, module in network.named_modules()
             if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d)}  # fmt: skip
    ours: dict[tuple[str, int, int], set[tuple[str, int, int]]] = {}
    for axis in wiring.axes:
        for channel in range(axis.size):
            entries = {(slot.tensor, slot.dim, int(entry)) for slot in axis.slots if slot.tensor in plain
                       for entry in slot.entries[channel]}  # fmt: skip
            ours |= dict.fromkeys(entries, entries)
    compared = 0
    for first, places in theirs(network, example).items():
        if first in ours:
            assert ours[first] == places, first
            compared += 1
    assert compared >= 8
