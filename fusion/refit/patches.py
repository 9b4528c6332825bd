"""A layer's weight as a matrix [g, m, d] for g groups, and its inputs as rows [g, n, d].

A few positions of each sample's outputs are used, the same in every network. A row is the patch that the output at
this position is computed from.
"""

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.fusion.graph.tracing import CONVOLUTIONS, TRANSPOSED


def places(samples: int, count: int, share: int | None, first: int = 0) -> Tensor:
    """Return which of `count` positions are used in each sample, [samples, share]: spread evenly, shifted by sample.

    `first`: the index of the first sample in the probe set.
    """
    if share is None or share >= count:
        return torch.arange(count).expand(samples, count)
    return (torch.arange(share) * count // share + torch.arange(first, first + samples)[:, None] * 7) % count


def picked(value: Tensor, share: int | None, dims: tuple[int, ...] = (1,), first: int = 0) -> Tensor:
    """Return observations of a tensor at some positions, as rows [k * positions, c].

    Args:
        value: The tensor, [k, ...].
        share: Positions for each sample; None: all.
        dims: The dimensions that are the channels, flattened.
        first: The number of the first sample, on which the positions depend (`places`).
    """
    value = value.movedim(dims, tuple(range(1, 1 + len(dims)))).flatten(1, len(dims))
    value = value.flatten(2) if value.ndim > 2 else value[:, :, None]
    where = places(len(value), value.shape[2], share, first).to(value.device)
    return value.gather(2, where[:, None].expand(-1, value.shape[1], -1)).transpose(1, 2).flatten(0, 1)


def patches(module: Any, inputs: Tensor, share: int | None, every: int = 1) -> Tensor:
    """Return a layer's inputs as rows [groups, rows, inputs of an output], to multiply with `matrix`.

    `share`: positions per sample, None for all. `every`: of these positions, which n-th is used.
    """
    return next(rule for kind, rule in _ROWS.items() if isinstance(module, kind))(module, inputs, share, every)


def matrix(module: Any, weight: Tensor) -> Tensor:
    """Return a layer's weight as [groups, outputs of a group, inputs of an output], in the order of `patches`."""
    if isinstance(module, TRANSPOSED):  # [in, out / g, ...]
        split = weight.unflatten(0, (module.groups, -1))
        return split.transpose(1, 2).flatten(2)
    return weight.reshape(getattr(module, "groups", 1), -1, prod(weight.shape[1:]))


def weight_of(module: Any, rows: Tensor) -> Tensor:
    """Return a matrix such as `matrix` returns in the shape of the module's weight: the inverse of `matrix`."""
    if isinstance(module, TRANSPOSED):
        split = rows.unflatten(2, (module.in_channels // module.groups, *module.kernel_size))
        return split.transpose(1, 2).flatten(0, 1)
    return rows.reshape(module.weight.shape)


def thinned(rows: Tensor, samples: int, every: int) -> Tensor:
    """Return the rows of every `every`-th position from rows [k * positions, c] of k samples."""
    return rows if every == 1 else rows.unflatten(0, (samples, -1))[:, ::every].flatten(0, 1)


def _linear(module: nn.Linear, inputs: Tensor, share: int | None, every: int) -> Tensor:
    return thinned(picked(inputs, share, (inputs.ndim - 1,)), len(inputs), every)[None]


def _convolution(module: Any, inputs: Tensor, share: int | None, every: int) -> Tensor:
    reach = _padding(module)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(inputs, [width for pair in reversed(reach) for width in pair], mode=mode)
    return _gathered(module, padded, module.stride, (share, every))


def _padding(module: Any) -> list[tuple[int, int]]:
    if module.padding == "valid":
        return [(0, 0)] * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(width, width) for width in module.padding]


def _transposed(module: Any, inputs: Tensor, share: int | None, every: int) -> Tensor:
    """Treat a transposed convolution as a plain one: flip the kernel, and put zeros between the inputs."""
    sizes = [(size - 1) * s + 1 for size, s in zip(inputs.shape[2:], module.stride, strict=True)]
    spread = inputs.new_zeros(*inputs.shape[:2], *sizes)
    spread[(slice(None), slice(None), *(slice(None, None, s) for s in module.stride))] = inputs
    pads = []
    for k, d, p, out in zip(module.kernel_size, module.dilation, module.padding, module.output_padding, strict=True):
        pads = [d * (k - 1) - p, d * (k - 1) - p + out, *pads]
    return _gathered(module, F.pad(spread, pads), (1,) * len(sizes), (share, every), turned=True)


def _gathered(
    module: Any, padded: Tensor, stride: tuple[int, ...], looked: tuple[int | None, int], turned: bool = False
) -> Tensor:
    kernel, dilation, sizes = module.kernel_size, module.dilation, padded.shape[2:]
    grid = [(size - d * (k - 1) - 1) // s + 1 for size, k, d, s in zip(sizes, kernel, dilation, stride, strict=True)]
    where = places(len(padded), prod(grid), looked[0])[:, :: looked[1]].to(padded.device)
    steps, rest = [], where
    for size in reversed(grid):
        steps.insert(0, rest % size)
        rest = rest // size
    flat = padded.flatten(2)
    columns = []
    for offsets in product(*(range(k) for k in kernel)):
        offsets = [k - 1 - o for o, k in zip(offsets, kernel, strict=True)] if turned else offsets
        index = torch.zeros_like(where)
        for at, s, o, d, size in zip(steps, stride, offsets, dilation, sizes, strict=True):
            index = index * size + at * s + o * d
        columns.append(flat.gather(2, index[:, None].expand(-1, flat.shape[1], -1)))
    rows = torch.stack(columns, dim=2)  # [k, c, kernel positions, output positions]
    rows = rows.permute(1, 2, 0, 3).flatten(2).unflatten(0, (module.groups, -1))
    return rows.flatten(1, 2).transpose(1, 2)


_ROWS: dict[type | tuple[type, ...], Callable[[Any, Tensor, int | None, int], Tensor]] = {
    nn.Linear: _linear,
    CONVOLUTIONS: _convolution,
    TRANSPOSED: _transposed,
}
