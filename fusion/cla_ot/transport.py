"""Optimal transport between the channels of two networks, one plan for each axis (OTFusion, Alg. 1; CLA+OT, Sec. 3.3).

A plan T [n, m] says how the m channels of one basis are composed of the n channels of another. It moves every tensor
on the axis. On the outgoing side, T is divided by its column sums, so that each new channel is a mean of old ones. On
the incoming side, it is divided by its row sums, so that the scale of later layers is unchanged at unequal widths.
For equal widths and uniform marginals, T is a permutation and both are the same.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.conf.errors import UserError

SMALLEST = 1e-300  # mass of a channel that goes nowhere
EPSILON = 1e-7  # added to column sums, as in the public code
TIE = 1e-6  # costs that differ by less, relative to the largest one, count as equal
ITERATIONS = 2000  # of Sinkhorn's algorithm
ASTRAY = 1e-2  # largest share of misplaced mass that rounding may correct; above it, a plan has not converged


@dataclass(frozen=True)
class TransportSettings:
    """How a transport plan is computed.

    Attributes:
        ground: The cost of two channels: "correlation" (1 - their correlation over the probe set), "euclidean" or
            "squared" (distance of their values).
        scale: What costs are divided by: their "max", "mean" or "median", or "none".
        solver: "exact" or "sinkhorn".
        regularisation: Of sinkhorn, > 0.
        marginals: "uniform", or "importance" (the norm of a channel's incoming weights).
        normalisation: "both" (see the module), or "columns" (column sums on both sides, as in the public code).
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
    """Return 1 - correlation [n, m] of channels, averaged over pairs ([n, values], [m, values]); 1 for constant channels."""
    costs = [1.0 - _standardised(x) @ _standardised(y).T for x, y in pairs]
    return torch.stack(costs).mean(dim=0).double().cpu().numpy()


def squared_cost(pairs: Sequence[tuple[Tensor, Tensor]]) -> np.ndarray:
    """Return squared Euclidean distances [n, m] of channels, summed over the pairs, in float64."""
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
    """Return a Sinkhorn plan, rounded to exact marginals, which the iterations only approach."""
    import ot  # here, because the import takes a second and most processes need no transport

    reg = settings.regularisation
    plan = np.asarray(ot.sinkhorn(mu, nu, cost, reg, method="sinkhorn_log", numItermax=ITERATIONS, warn=False))
    astray = float(max(np.abs(plan.sum(axis=1) - mu).sum(), np.abs(plan.sum(axis=0) - nu).sum()))
    if not astray <= ASTRAY:
        raise UserError(f"transport: sinkhorn with regularisation {reg:g} has not converged in {ITERATIONS} iterations for "
                        f"{len(mu)} x {len(nu)} channels ({100 * astray:.3g} % of the mass is out of place); use a larger "
                        "regularisation, or exact plans")  # fmt: skip
    return rounded(plan, mu, nu)


def rounded(plan: np.ndarray, mu: np.ndarray, nu: np.ndarray) -> np.ndarray:
    """Return a plan [n, m] close to `plan`, with marginals mu [n] and nu [m] (Altschuler et al. 2017, Alg. 2)."""
    tiny = np.finfo(np.float64).tiny
    plan = plan * np.minimum(mu / np.maximum(plan.sum(axis=1), tiny), 1.0)[:, None]
    plan = plan * np.minimum(nu / np.maximum(plan.sum(axis=0), tiny), 1.0)
    rows, columns = np.maximum(mu - plan.sum(axis=1), 0.0), np.maximum(nu - plan.sum(axis=0), 0.0)
    return plan + np.outer(rows, columns) / max(columns.sum(), tiny)


def exact_plan(mu: np.ndarray, nu: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return the plan [n, m] of least cost with marginals mu [n] and nu [m] (network simplex).

    Of equally cheap plans between equal numbers, it returns one that leaves most channels in place, such as constant
    ones.
    """
    import ot

    if cost.shape[0] == cost.shape[1]:
        cost = cost + TIE * np.abs(cost).max() * (1.0 - np.eye(len(cost)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a solver that does not converge only warns
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
    """A transport plan of n channels to m: `joint` [n, m], float64, with marginals mu [n] and nu [m], and its cost."""

    joint: Tensor
    cost: float
    normalisation: str = "both"

    @property
    def outgoing(self) -> Tensor:
        """The matrix [n, m] for tensors that write channels; columns sum to 1: a new channel is a mean of old ones."""
        return self.joint / (self.joint.sum(dim=0) + (EPSILON if self.normalisation == "columns" else 0.0))

    @property
    def incoming(self) -> Tensor:
        """The matrix [n, m] for tensors that read channels; rows sum to 1 unless the normalisation is "columns"."""
        if self.normalisation == "columns":
            return self.outgoing
        return self.joint / self.joint.sum(dim=1, keepdim=True).clamp(min=SMALLEST)


def solve(
    cost: np.ndarray, settings: TransportSettings, *, groups: int = 1, importance: tuple[Tensor, Tensor] | None = None
) -> Plan:
    """Return the transport plan for the costs [n, m] between channels.

    Args:
        cost: The costs, [n, m].
        settings: The solver and its options.
        groups: The number of groups of consecutive channels. Whole groups, of equal weight, move to whole groups.
        importance: Weights [n] and [m] of the channels, for settings.marginals "importance"; used within each group.

    Raises:
        UserError: Costs are not finite, or the solver does not converge.
    """
    if groups == 1:
        cost = scaled(cost, settings)
        joint = SOLVERS[settings.solver](*marginals(cost.shape, settings, importance), cost, settings)
        return Plan(torch.from_numpy(joint), float((joint * cost).sum()), settings.normalisation)
    own, other = (np.arange(count).reshape(groups, -1) for count in cost.shape)
    blocks = Blocks(cost, (own, other), settings, importance)
    return blocks.plan(between_groups(blocks.table))


class Blocks:
    """Transport plans for grouped channels: one plan for each pair of a group and another network's group.

    To move whole groups, find a plan between groups from the costs in `table`, and pass it to `plan`.

    Attributes:
        table: The cost of moving each group to each other group, [groups, other groups].
    """

    def __init__(
        self, cost: np.ndarray, places: tuple[np.ndarray, np.ndarray], settings: TransportSettings,
        importance: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Compute the plan for each pair of groups.

        Args:
            cost: The costs between channels, [n, m].
            places: For both networks, the channels of each group, [groups, size].
            settings: The solver and its options.
            importance: As in `solve`.
        """
        self.cost, self.places, self.settings = scaled(cost, settings), places, settings
        mu, nu = marginals(cost.shape, settings, importance)
        self.plans = [[_block(self.cost, mu, nu, i, j, settings) for j in places[1]] for i in places[0]]
        costs = [[float((plan * self.cost[np.ix_(i, j)]).sum()) for plan, j in zip(line, places[1], strict=True)]
                 for line, i in zip(self.plans, places[0], strict=True)]  # fmt: skip
        self.table = np.array(costs)

    def plan(self, between: np.ndarray) -> Plan:
        """Return the plan of all channels.

        Args:
            between: A transport plan between the groups, [groups, other groups].
        """
        joint, groups = np.zeros_like(self.cost), len(between)
        for a, b in np.argwhere(between > 0):
            i, j = self.places[0][a], self.places[1][b]
            share = 1.0 / groups if between.shape[0] == between.shape[1] else between[a, b]
            joint[np.ix_(i, j)] = self.plans[a][b] * share
        return Plan(torch.from_numpy(joint), float((joint * self.cost).sum()), self.settings.normalisation)


def between_groups(table: np.ndarray) -> np.ndarray:
    """Return the exact plan [n, m] between groups of equal weight. `table`: the costs between them."""
    n, m = table.shape
    return exact_plan(np.full(n, 1.0 / n), np.full(m, 1.0 / m), table)


def scaled(cost: np.ndarray, settings: TransportSettings) -> np.ndarray:
    """Return costs divided by their maximum, mean or median (settings.scale). Raise UserError if they are not finite."""
    if not np.isfinite(cost).all():
        raise UserError("transport: costs between channels are not finite; a network or the probe set has NaN")
    return cost / (SCALES[settings.scale](cost) or 1.0)


def neutral_plan(rows: int, columns: int, normalisation: str = "both") -> Plan:
    """Return the plan [n, m] for indistinguishable channels: the identity, or uniform for unequal numbers."""
    joint = torch.eye(rows) / rows if rows == columns else torch.full((rows, columns), 1.0 / (rows * columns))
    return Plan(joint.double(), 0.0, normalisation)


def same_plan(rows: int, columns: int, normalisation: str = "both") -> Plan:
    """Return the plan [n, m] that maps the first m of n channels to the same numbers. Raise UserError if m > n."""
    if columns > rows:
        raise UserError(f"basis='same': got {columns} channels, but there are at most {rows} here")
    return Plan(torch.eye(rows, columns).double() / columns, 0.0, normalisation)


def marginals(
    shape: tuple[int, ...], settings: TransportSettings, importance: tuple[Tensor, Tensor] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mass of each row and each column of a plan, with sums of 1: equal, or by importance."""
    if settings.marginals == "uniform" or importance is None:
        return np.full(shape[0], 1.0 / shape[0]), np.full(shape[1], 1.0 / shape[1])
    mu, nu = (weight.double().cpu().numpy() + 1e-9 for weight in importance)
    return mu / mu.sum(), nu / nu.sum()


def _block(
    cost: np.ndarray, mu: np.ndarray, nu: np.ndarray, i: np.ndarray, j: np.ndarray, settings: TransportSettings
) -> np.ndarray:
    own, other = mu[i] / mu[i].sum(), nu[j] / nu[j].sum()
    return SOLVERS[settings.solver](own, other, np.ascontiguousarray(cost[np.ix_(i, j)]), settings)
