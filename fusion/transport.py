"""Optimal transport between the channels of two networks, one plan for each axis (OTFusion, Alg. 1; CLA+OT, Sec. 3.3).

A plan T [n, m] says how the m channels of one basis are made of the n channels of another. Every tensor that lies on the
axis is moved by it: T divided by its column sums on the outgoing side, so that each new channel is a mean of old ones, and
on the incoming side divided by its row sums, so that the scale of what follows is kept at unequal widths. For equal widths
and uniform marginals T is a permutation, and both are the same.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import ot
import torch
from torch import Tensor

from conf.errors import UserError
from fusion.channels import Layer
from fusion.exact import State

PIECE = 1024  # columns of a weight that are moved at once
FEW = 4  # entries a row or column: plans with no more are taken as sparse
EPSILON = 1e-7  # beside column sums, as in the public code
TIE = 1e-6  # costs that differ by no more of the largest one are alike
ITERATIONS = 2000  # of Sinkhorn's
ASTRAY = 1e-2  # share of the mass that rounding may move: a plan with more out of place has not converged


@dataclass(frozen=True)
class TransportSettings:
    """How a plan is made.

    `ground`: cost of two channels: "correlation" (1 - their correlation over the probe set), "euclidean" or "squared" (of
    their values). `scale`: the costs are divided by their "max", "mean" or "median" ("none"). `solver`: "exact" or
    "sinkhorn" with `regularisation` (> 0). `marginals`: "uniform" or "importance" (the norm of a channel's incoming
    weights). `normalisation`: "both" (see above) or "columns" (column sums on both sides, as in the public code).
    """

    ground: str = "correlation"
    scale: str = "none"
    solver: str = "exact"
    regularisation: float = 0.05
    marginals: str = "uniform"
    normalisation: str = "both"

    def __post_init__(self) -> None:
        takes = {"ground": GROUNDS, "scale": SCALES, "solver": SOLVERS, "marginals": ("uniform", "importance"),
                 "normalisation": ("both", "columns")}  # fmt: skip
        for name, values in takes.items():
            if getattr(self, name) not in values:
                raise UserError(f"transport {name}: got '{getattr(self, name)}', takes one of: {', '.join(values)}")
        if not 0.0 < self.regularisation < float("inf"):
            raise UserError(f"transport regularisation: got {self.regularisation}, takes a number above 0")


def correlation_cost(pairs: Sequence[tuple[Tensor, Tensor]]) -> np.ndarray:
    """1 - correlation [n, m] of channels, the mean over pairs of ([n, values], [m, values]); 1 for constant channels."""
    costs = [1.0 - _standardised(x) @ _standardised(y).T for x, y in pairs]
    return torch.stack(costs).mean(dim=0).double().cpu().numpy()


def squared_cost(pairs: Sequence[tuple[Tensor, Tensor]]) -> np.ndarray:
    """Squared Euclidean distances [n, m] of channels, summed over the pairs, in float64."""
    costs = []
    for x, y in ((one.double(), other.double()) for one, other in pairs):
        costs.append((x.square().sum(1)[:, None] + y.square().sum(1)[None] - 2.0 * x @ y.T).clamp(min=0.0))
    return torch.stack(costs).sum(dim=0).cpu().numpy()


def _standardised(x: Tensor) -> Tensor:
    x = x - x.mean(dim=1, keepdim=True)
    return x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)


GROUNDS: dict[str, Callable[[Sequence[tuple[Tensor, Tensor]]], np.ndarray]] = {
    "correlation": correlation_cost,
    "squared": squared_cost,
    "euclidean": lambda pairs: np.sqrt(squared_cost(pairs)),
}
SCALES: dict[str, Callable[[np.ndarray], float]] = {
    "none": lambda _: 1.0,
    "max": lambda cost: float(cost.max()),
    "mean": lambda cost: float(cost.mean()),
    "median": lambda cost: float(np.median(cost)),
}


def _sinkhorn(mu: np.ndarray, nu: np.ndarray, cost: np.ndarray, settings: TransportSettings) -> np.ndarray:
    """Rounded onto the plans with these marginals, which iterations reach in the limit only; a converged one stays."""
    reg = settings.regularisation
    plan = np.asarray(ot.sinkhorn(mu, nu, cost, reg, method="sinkhorn_log", numItermax=ITERATIONS, warn=False))
    astray = float(max(np.abs(plan.sum(axis=1) - mu).sum(), np.abs(plan.sum(axis=0) - nu).sum()))
    if not astray <= ASTRAY:
        raise UserError(f"transport: sinkhorn with regularisation {reg:g} has not converged in {ITERATIONS} iterations for "
                        f"{len(mu)} x {len(nu)} channels ({100 * astray:.3g} % of the mass is out of place); use a larger "
                        "regularisation, or exact plans")  # fmt: skip
    return rounded(plan, mu, nu)


def rounded(plan: np.ndarray, mu: np.ndarray, nu: np.ndarray) -> np.ndarray:
    """A plan [n, m] near the given one, with marginals mu [n] and nu [m] (Altschuler et al. 2017, Alg. 2)."""
    tiny = np.finfo(np.float64).tiny
    plan = plan * np.minimum(mu / np.maximum(plan.sum(axis=1), tiny), 1.0)[:, None]
    plan = plan * np.minimum(nu / np.maximum(plan.sum(axis=0), tiny), 1.0)
    rows, columns = np.maximum(mu - plan.sum(axis=1), 0.0), np.maximum(nu - plan.sum(axis=0), 0.0)
    return plan + np.outer(rows, columns) / max(columns.sum(), tiny)


def exact_plan(mu: np.ndarray, nu: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """The plan [n, m] of least cost with marginals mu [n] and nu [m] (network simplex).

    Of plans that cost the same, one between equal numbers leaves in place what it can: channels that are constant, which
    nothing tells apart, too.
    """
    if cost.shape[0] == cost.shape[1]:
        cost = cost + TIE * np.abs(cost).max() * (1.0 - np.eye(len(cost)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a solver that gives up says so by a warning
        try:
            return np.asarray(ot.emd(mu, nu, cost, numItermax=10_000_000))
        except UserWarning as warning:
            raise UserError(
                f"transport: no exact plan for {len(mu)} x {len(nu)} channels ({warning}); use sinkhorn"
            ) from None


SOLVERS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, TransportSettings], np.ndarray]] = {
    "exact": lambda mu, nu, cost, settings: exact_plan(mu, nu, cost),
    "sinkhorn": _sinkhorn,
}


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan between two bases of an axis: `joint` [n, m] float64 with marginals mu [n] and nu [m]; its transport cost."""

    joint: Tensor
    cost: float
    normalisation: str = "both"

    @property
    def outgoing(self) -> Tensor:
        """[n, m], each column sums to 1: a channel of the new basis as a mean of old ones."""
        return self.joint / (self.joint.sum(dim=0) + (EPSILON if self.normalisation == "columns" else 0.0))

    @property
    def incoming(self) -> Tensor:
        """[n, m] for the side that reads the axis; rows sum to 1 unless the normalisation is "columns"."""
        if self.normalisation == "columns":
            return self.outgoing
        return self.joint / self.joint.sum(dim=1, keepdim=True)


def solve(
    cost: np.ndarray, settings: TransportSettings, *, groups: int = 1, importance: tuple[Tensor, Tensor] | None = None
) -> Plan:
    """The plan for a cost matrix [n, m]. `groups`: of GroupNorm; whole groups then go to whole groups, of equal weight.

    `importance`: weights [n] and [m] of the channels, for settings.marginals "importance" (within each group, if there are
    any). Raises UserError if the costs are not finite or the solver does not converge.
    """
    if not np.isfinite(cost).all():
        raise UserError("transport: costs between channels are not finite; a network or the probe set holds NaN")
    cost = cost / (SCALES[settings.scale](cost) or 1.0)
    mu, nu = _marginals(cost.shape, settings, importance)
    whole = SOLVERS[settings.solver]
    joint = _grouped(cost, groups, mu, nu, settings) if groups > 1 else whole(mu, nu, cost, settings)
    return Plan(torch.from_numpy(joint), float((joint * cost).sum()), settings.normalisation)


def neutral_plan(rows: int, columns: int, normalisation: str = "both") -> Plan:
    """The plan [n, m] for channels that nothing tells apart: each stays, or, for other numbers, each to all alike."""
    joint = torch.eye(rows) / rows if rows == columns else torch.full((rows, columns), 1.0 / (rows * columns))
    return Plan(joint.double(), 0.0, normalisation)


@dataclass(frozen=True, eq=False)
class Moves:
    """Matrices [n, m] by layer name: how each layer's outputs and inputs move. A layer that is not named stays."""

    outgoing: Mapping[str, Tensor]
    incoming: Mapping[str, Tensor]
    costs: Mapping[str, float]


def moved(state: Mapping[str, Tensor], layers: Sequence[Layer], moves: Moves) -> State:
    """A network's state in the basis that the moves lead to.

    Weights [out, in, ...] move on both sides, vectors (bias, norms and their statistics) with the outputs; a linear layer
    behind a flatten with its channels. Raises UserError naming a tensor whose size is not the plan's.
    """
    new = dict(state)
    for layer in {layer.name: layer for layer in layers}.values():
        for name, tensor in ((name, state[name]) for name in state if name.rpartition(".")[0] == layer.name):
            if tensor.ndim and layer.name in moves.outgoing:
                new[name] = apply(new[name], moves.outgoing[layer.name], 0, name)
            if tensor.ndim > 1 and layer.kind != "depthwise" and layer.name in moves.incoming:
                new[name] = apply(new[name], moves.incoming[layer.name], 1, name)
    return {name: tensor.clone() if tensor is state[name] else tensor for name, tensor in new.items()}


def apply(tensor: Tensor, matrix: Tensor, dim: int, name: str = "") -> Tensor:
    """The tensor with dimension `dim` (n channels; n * r entries behind a flatten) mapped by matrix [n, m] float64."""
    repeat, rest = divmod(tensor.shape[dim], len(matrix))
    if rest or (repeat > 1 and tensor.ndim > 2):
        raise UserError(f"tensor '{name}': dimension {dim} has {tensor.shape[dim]} entries, the plan {len(matrix)} channels")
    front = tensor.movedim(dim, 0)
    pieces = front.reshape(len(matrix), -1).split(PIECE, dim=1)
    times = _sparse(matrix) if matrix.count_nonzero() <= FEW * sum(matrix.shape) else matrix.T.matmul
    new = torch.cat([times(piece.to(matrix)).to(tensor) for piece in pieces], dim=1)
    return new.reshape(matrix.shape[1] * repeat, *front.shape[1:]).movedim(0, dim).contiguous()


def _sparse(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Multiplication by the transposed matrix, entry by entry: an exact plan has at most n + m - 1."""
    rows, columns = matrix.nonzero(as_tuple=True)
    entries = matrix[rows, columns][:, None]
    return lambda piece: piece.new_zeros(matrix.shape[1], piece.shape[1]).index_add_(0, columns, piece[rows] * entries)


def _marginals(
    shape: tuple[int, ...], settings: TransportSettings, importance: tuple[Tensor, Tensor] | None
) -> tuple[np.ndarray, np.ndarray]:
    if settings.marginals == "uniform" or importance is None:
        return np.full(shape[0], 1.0 / shape[0]), np.full(shape[1], 1.0 / shape[1])
    mu, nu = (weight.double().cpu().numpy() + 1e-9 for weight in importance)
    return mu / mu.sum(), nu / nu.sum()


def _grouped(cost: np.ndarray, groups: int, mu: np.ndarray, nu: np.ndarray, settings: TransportSettings) -> np.ndarray:
    """First the plans between any two groups, then whole groups assigned by their costs."""
    rows, columns = np.split(np.arange(len(mu)), groups), np.split(np.arange(len(nu)), groups)
    blocks = [[_block(cost, mu, nu, i, j, settings) for j in columns] for i in rows]
    each = np.full(groups, 1.0 / groups)
    table = np.array([[float((plan * cost[np.ix_(i, j)]).sum()) for plan, j in zip(line, columns, strict=True)]
                      for line, i in zip(blocks, rows, strict=True)])  # fmt: skip
    chosen = exact_plan(each, each, table) > 0
    joint = np.zeros_like(cost)
    for a, i in enumerate(rows):
        for b, j in enumerate(columns):
            if chosen[a, b]:
                joint[np.ix_(i, j)] = blocks[a][b] / groups
    return joint


def _block(
    cost: np.ndarray, mu: np.ndarray, nu: np.ndarray, i: np.ndarray, j: np.ndarray, settings: TransportSettings
) -> np.ndarray:
    own, other = mu[i] / mu[i].sum(), nu[j] / nu[j].sum()
    return SOLVERS[settings.solver](own, other, np.ascontiguousarray(cost[np.ix_(i, j)]), settings)
