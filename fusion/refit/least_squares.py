"""Ridge regression toward existing weights, from rows in memory or from sums that several sites can add.

A layer y = W x + b with inputs x [d] and targets t [m] becomes the one with the least squared error and a penalty on
change: W + argmin_V |E - V X|^2 + penalty * |V D^(1/2)|^2. E are the targets minus the layer's outputs, X the inputs,
both centred; D are the inputs' variances. The bias is free. Directions that the rows do not show stay unchanged.
Layers of several groups (grouped and depthwise convolutions, norms) have one such problem for each group, [g, ...].
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.conf.errors import UserError

FLOOR = 1e-3  # relative to the mean variance; added to D, so that a nearly constant input gets no large weight
TINY = 1e-30
JITTER, MAX_JITTER = 1e-7, 1e3
PIECE = 2048  # rows that are multiplied at once; pieces are summed in float64
BAND = 128  # rows of a symmetric product that are computed at once


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Sums over rows of a layer's inputs x [g, d] and of its output errors e [g, m]; all float64.

    `count`: rows. `inputs` [g, d] and `errors` [g, m]: sums. `gram` [g, d, d]: of x x'. `cross` [g, d, m]: of x e'.
    Statistics of several sites on the same layer can be added, and subtracted again. They contain no single row, but
    are not anonymous: they reveal much about a site with few images.
    """

    count: int
    inputs: Tensor
    errors: Tensor
    gram: Tensor
    cross: Tensor

    @classmethod
    def of(cls, pieces: Iterable[tuple[Tensor, Tensor]]) -> "LayerStatistics":
        """Return the statistics of rows in pieces, each of inputs [g, n, d] and errors [g, n, m]."""
        parts = (cls._of_piece(x, e) for piece in pieces for x, e in zip(*(t.split(PIECE, 1) for t in piece), strict=True))
        total = next(parts)
        for part in parts:
            total = total + part
        return total

    @classmethod
    def _of_piece(cls, x: Tensor, e: Tensor) -> "LayerStatistics":
        gram, cross = squared(x.mT).double(), (x.mT @ e).double()
        return cls(x.shape[1], x.double().sum(1), e.double().sum(1), gram, cross)

    def __add__(self, other: "LayerStatistics") -> "LayerStatistics":
        return LayerStatistics(self.count + other.count, self.inputs + other.inputs, self.errors + other.errors,
                               self.gram + other.gram, self.cross + other.cross)  # fmt: skip

    def __sub__(self, other: "LayerStatistics") -> "LayerStatistics":
        return LayerStatistics(self.count - other.count, self.inputs - other.inputs, self.errors - other.errors,
                               self.gram - other.gram, self.cross - other.cross)  # fmt: skip

    def change(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Return what to add to the layer's weight [g, m, d] and bias [g, m], by ridge regression with this penalty."""
        mean, lack = self.inputs / self.count, self.errors / self.count
        gram = self.gram - self.count * mean[:, :, None] * mean[:, None, :]
        cross = self.cross - self.count * mean[:, :, None] * lack[:, None, :]
        gram.diagonal(dim1=1, dim2=2).add_(penalty * _spread(gram.diagonal(dim1=1, dim2=2)))
        weight = _solved(gram, cross, self.gram.diagonal(dim1=1, dim2=2).mean(1)).mT
        return weight, lack - (weight @ mean[:, :, None]).squeeze(2)


def change_of_rows(inputs: Tensor, errors: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return LayerStatistics.change for rows in memory, [g, n, d] and [g, n, m]; by an [n, n] matrix if n < d."""
    if inputs.shape[1] >= inputs.shape[2]:
        return LayerStatistics.of([(inputs, errors)]).change(penalty)
    mean, lack = inputs.mean(1, keepdim=True), errors.mean(1, keepdim=True)
    x = inputs - mean
    root = _spread(x.square().sum(1)).sqrt()[:, None]
    x /= root
    kernel = squared(x).double()
    kernel.diagonal(dim1=1, dim2=2).add_(penalty)
    dual = _solved(kernel, (errors - lack).double(), kernel.diagonal(dim1=1, dim2=2).mean(1))
    weight = (dual.mT.to(x) @ x).div_(root).double()
    return weight, (lack.double() - (weight @ mean.mT.double()).mT).squeeze(1)


def squared(x: Tensor) -> Tensor:
    """Return x x', [..., n, n], of x [..., n, d]. Blocks above the diagonal are copied from those below."""
    total = x.new_empty(*x.shape[:-1], x.shape[-2])
    for begin in range(0, x.shape[-2], BAND):
        rows, before = slice(begin, begin + BAND), slice(0, begin)
        part = x[..., rows, :] @ x[..., : rows.stop, :].mT
        total[..., rows, : rows.stop] = part
        total[..., before, rows] = part[..., before].mT
    return total


def _solved(matrix: Tensor, right: Tensor, size: Tensor) -> Tensor:
    """Return matrix^-1 right, [g, n, m].

    Nearly constant inputs can leave a matrix that is not quite positive. Then growing multiples of `size` [g] are
    added to its diagonal, until it is.
    """
    added = JITTER
    factor, failed = torch.linalg.cholesky_ex(matrix)
    while bool(failed.any()):
        if not added <= MAX_JITTER:
            raise UserError("refit: a layer's inputs are too large for their type; scale them, or convert all to float64")
        matrix.diagonal(dim1=1, dim2=2).add_(added * size[:, None] + TINY)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        added *= 10.0
    return torch.cholesky_solve(right, factor)


def _spread(diagonal: Tensor) -> Tensor:
    """Return D [g, d]: the inputs' variances times their number, all above 0."""
    return diagonal.clamp(min=0.0) + FLOOR * diagonal.mean(1, keepdim=True).clamp(min=0.0) + TINY
