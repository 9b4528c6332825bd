"""The smallest batch that a network can train on."""

import functools

import torch

from fedloom.clients.networks import Architecture
from fedloom.conf.randomness import drawing
from fedloom.fusion.state import BATCH_NORM


@functools.lru_cache(maxsize=256)
def min_batch_size(architecture: Architecture) -> int:
    """Return 2 if a BatchNorm would get one value per channel from a single example, which torch refuses; else 1."""
    network = architecture.build().train()
    if not any(isinstance(module, BATCH_NORM) for module in network.modules()):
        return 1
    with drawing(), torch.no_grad():
        fits = [_takes(network, architecture.form.zeros(count))
                for count in (1, 2)]  # fmt: skip
    return 2 if fits == [False, True] else 1


def _takes(network: torch.nn.Module, inputs: torch.Tensor) -> bool:
    try:
        network(inputs)
    except Exception:  # torch's BatchNorm raises ValueError, a user's network may raise anything
        return False
    return True
