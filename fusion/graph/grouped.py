"""Convert weights of grouped convolutions to dense ones and back; zero where an output does not read an input."""

import torch
from torch import Tensor


def dense(weight: Tensor, groups: int) -> Tensor:
    """Return a grouped weight [out, in / groups, ...] as a dense one [out, in, ...]."""
    outputs, each = len(weight) // groups, weight.shape[1]
    full = weight.new_zeros(len(weight), groups * each, *weight.shape[2:])
    for group in range(groups):
        rows, columns = slice(group * outputs, (group + 1) * outputs), slice(group * each, (group + 1) * each)
        full[rows, columns] = weight[rows]
    return full


def in_groups(weight: Tensor, groups: int) -> Tensor:
    """Return a dense weight [out, in, ...] as a grouped one [out, in / groups, ...]: the blocks on the diagonal."""
    blocks = [rows.chunk(groups, dim=1)[group] for group, rows in enumerate(weight.chunk(groups))]
    return torch.cat(blocks)
