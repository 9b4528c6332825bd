"""Match the layers of a deeper network with those of a shallower one (CLA+OT, Definition 1 and Algorithm 1).

The map is strictly increasing and minimises the sum of the costs of matched layers. The paper's printed algorithm
forces the first layer afterwards, so it is not optimal. Here the constraints are part of the recursion.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.transport import exact_plan
from fedloom.fusion.graph.channels import Unit, Wiring, wire
from fedloom.fusion.inputs import plain_networks
from fedloom.fusion.probe import Observation, check_probe, cka, features_of, observe


def optimal_alignment(cost: ArrayLike, *, pin_first: bool = True, pin_last: bool = True) -> tuple[int, ...]:
    """Return the alignment a of least cost: for each layer j of the shallower network, its match a(j) in the deeper one.

    It minimises sum_j cost[a(j), j] with a(0) < a(1) < ... < a(n-1), in O(mn). Of equal sums, the result has the smaller
    rows, from the last backwards.

    Args:
        cost: The costs, [m, n] with m >= n. Rows are the deeper network's layers.
        pin_first: Whether to require a(0) = 0. With a single column, this takes precedence over `pin_last`.
        pin_last: Whether to require a(n-1) = m - 1.

    Raises:
        UserError: There are fewer rows than columns, or costs are not finite.
    """
    table = np.asarray(cost, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] < table.shape[1] or not table.shape[1]:
        raise UserError(
            f"alignment: costs of shape {list(table.shape)}; use [m, n] with m >= n >= 1, the deeper network first"
        )
    if not np.isfinite(table).all():
        raise UserError("alignment: the costs are not all finite: a network or the probe set has NaN or infinite values")
    m, n = table.shape
    ends = np.empty((n, m))  # ends[j, i]: the smallest sum of columns 0..j with a(j) = i
    ends[0] = table[:, 0]
    if pin_first:
        ends[0, 1:] = np.inf
    for column in range(1, n):
        before = np.concatenate(([np.inf], np.minimum.accumulate(ends[column - 1])[:-1]))
        ends[column] = before + table[:, column]
    row = m - 1 if pin_last and (n > 1 or not pin_first) else int(np.argmin(ends[-1]))
    rows = [row]
    for column in range(n - 2, -1, -1):
        rows.append(int(np.argmin(ends[column, : rows[-1]])))
    return tuple(reversed(rows))


def layer_costs(
    a: nn.Module, b: nn.Module, probe: Tensor, *, representation: str = "preactivation", dissimilarity: str = "cka"
) -> np.ndarray:
    """Return the costs between the hidden layers (or residual blocks) of two networks (CLA+OT, Sec. 3.1).

    Args:
        a: A network with m hidden layers.
        b: A network with n hidden layers.
        probe: Inputs, [k, ...].
        representation: "preactivation", or "neurons": the squared difference of their numbers.
        dissimilarity: For "preactivation": "cka" (1 - linear CKA, centred over the samples), or "wasserstein" (between the
            layers' neurons, each a vector over samples and positions; infinite if these differ).

    Returns:
        The costs, float64 [m, n].

    Raises:
        UserError: A name is unknown, or the probe set is not usable.
        WiringError: A network cannot be wired.
    """
    name = "neurons" if representation == "neurons" else dissimilarity
    known = representation == "neurons" or (representation == "preactivation" and dissimilarity in ("cka", "wasserstein"))
    if not known:
        raise UserError(f"layer_costs: no comparison of '{representation}' by '{dissimilarity}'; use preactivation by cka "
                        "or wasserstein, or neurons")  # fmt: skip
    wirings = wired(plain_networks([a, b]), probe)
    seen = []
    for wiring in wirings:
        looked = looked_at(wiring.units, name)
        seen.append(observe(wiring, probe, features=looked.get("features", ()), grams=looked.get("grams", ())))
    return costs_between(wirings[0].units, wirings[1].units, seen[0], seen[1], name)


def wired(networks: Sequence[nn.Module], probe: Tensor) -> list[Wiring]:
    """Return each network's Wiring for inputs like `probe`. Errors start with the network's index."""
    wirings = []
    for index, network in enumerate(networks):
        try:
            check_probe(network, probe)
            wirings.append(wire(network, probe[:1]))
        except UserError as error:
            raise type(error)(f"network {index}: {error}") from error
    return wirings


def looked_at(units: Iterable[Unit], name: str) -> dict[str, set[str]]:
    """Return the arguments of `observe` (names of nodes) that COSTS[name] needs to compare these units."""
    nodes = {unit.node for unit in units}
    return {"cka": {"grams": nodes}, "wasserstein": {"features": nodes}}.get(name, {})


def costs_between(
    ones: Sequence[Unit], twos: Sequence[Unit], seen: Observation, other: Observation, name: str
) -> np.ndarray:
    """Return the costs [ones, twos] between two networks' units, from their observations `seen` and `other`."""
    pairs = [[COSTS[name](u, v, seen, other) for v in twos] for u in ones]
    return np.array(pairs, dtype=np.float64).reshape(len(ones), len(twos))


def _cka_cost(u: Unit, v: Unit, seen: Observation, other: Observation) -> float:
    return 1.0 - cka(seen.grams[u.node], other.grams[v.node])


def _neurons_cost(u: Unit, v: Unit, seen: Observation, other: Observation) -> float:
    return float((u.shape[0] - v.shape[0]) ** 2)


def _wasserstein_cost(u: Unit, v: Unit, seen: Observation, other: Observation) -> float:
    x, y = features_of(seen, u.node).double(), features_of(other, v.node).double()
    if x.shape[1] != y.shape[1]:
        return float("inf")
    cost = torch.cdist(x, y).cpu().numpy()
    return float((exact_plan(np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y)), cost) * cost).sum())


COSTS: dict[str, Callable[[Unit, Unit, Observation, Observation], float]] = {
    "cka": _cka_cost,
    "wasserstein": _wasserstein_cost,
    "neurons": _neurons_cost,
}


@dataclass(frozen=True)
class Pins:
    """Whether the first and the last layers of a group must correspond."""

    first: bool = True
    last: bool = True

    def decide(self, many: int, few: int) -> bool:
        """Return whether the matches between groups of these sizes are determined without comparing layers."""
        return many == few or few <= self.first + self.last


def match_units(
    deep: Wiring, shallow: Wiring, cost: np.ndarray, *, pin_first: bool = True, pin_last: bool = True
) -> dict[int, int]:
    """Match the units (layers and blocks) of two networks by their costs, group by group.

    In each group, every unit of the smaller side gets a match.

    Args:
        deep: The wiring of the network with more units.
        shallow: The wiring of the other network.
        cost: The costs between units, [deep, shallow].
        pin_first: Whether the first units match each other.
        pin_last: Whether the last units match each other.

    Returns:
        By index of a unit of `deep`, its match in `shallow`.

    Raises:
        UserError: The networks have different groups (max-pools, stages, fully connected part).
    """
    return _match(deep, shallow, lambda i, j: cost[np.ix_(i, j)], Pins(pin_first, pin_last))


def match_seen(
    deep: Wiring, shallow: Wiring, seen: Observation, other: Observation, name: str, pins: Pins
) -> dict[int, int]:
    """Return what `match_units` returns, with COSTS[name] from observations of the `undecided` units."""

    def cost(i: Sequence[int], j: Sequence[int]) -> np.ndarray:
        if pins.decide(max(len(i), len(j)), min(len(i), len(j))):
            return np.zeros((len(i), len(j)))
        return costs_between([deep.units[k] for k in i], [shallow.units[k] for k in j], seen, other, name)

    return _match(deep, shallow, cost, pins)


def match_evenly(deep: Wiring, shallow: Wiring) -> dict[int, int]:
    """Return matches by position alone: first to first, last to last, the others evenly spread in each group."""

    def cost(i: Sequence[int], j: Sequence[int]) -> np.ndarray:
        ours, theirs = (np.arange(len(each)) * max(1, len(other) - 1) for each, other in ((i, j), (j, i)))
        return np.square(ours[:, None] - theirs).astype(np.float64)  # integers, so that equal costs are exactly equal

    return _match(deep, shallow, cost, Pins())


def pairs_of(one: Wiring, other: Wiring, matches: Mapping[int, int]) -> dict[str, str]:
    """Return the names of matched units, {name in `one`: name in `other`}, in the order of `one`."""
    return {one.units[i].name: other.units[j].name for i, j in sorted(matches.items())}


def undecided(deep: Wiring, shallow: Wiring, pins: Pins) -> tuple[list[Unit], list[Unit]]:
    """Return the units of both networks whose matches `pins` do not determine, so that they need a comparison."""
    units: tuple[list[Unit], list[Unit]] = [], []
    for i, j in _paired_groups(deep, shallow):
        if not pins.decide(max(len(i), len(j)), min(len(i), len(j))):
            units[0].extend(deep.units[k] for k in i)
            units[1].extend(shallow.units[k] for k in j)
    return units


def _match(
    deep: Wiring, shallow: Wiring, cost: Callable[[Sequence[int], Sequence[int]], np.ndarray], pins: Pins
) -> dict[int, int]:
    matches = {}
    for i, j in _paired_groups(deep, shallow):
        part, flipped = cost(i, j), len(i) < len(j)
        picked = optimal_alignment(part.T if flipped else part, pin_first=pins.first, pin_last=pins.last)
        for few, many in enumerate(picked):
            matches[i[few] if flipped else i[many]] = j[many] if flipped else j[few]
    return matches


def _paired_groups(deep: Wiring, shallow: Wiring) -> list[tuple[list[int], list[int]]]:
    """Return the indices of the units of each group in both networks."""
    sides = _groups(deep), _groups(shallow)
    kinds = [[(wiring.units[units[0]].kind, len(wiring.units[units[0]].shape)) for units in side]
             for wiring, side in zip((deep, shallow), sides, strict=True)]  # fmt: skip
    if kinds[0] != kinds[1]:
        texts = [" + ".join(f"{len(units)} {_kind(wiring.units[units[0]])}" for units in side) or "none"
                for wiring, side in zip((deep, shallow), sides, strict=True)]  # fmt: skip
        raise UserError(f"the networks are of different families; groups of layers: {texts[0]} here, {texts[1]} there")
    return list(zip(*sides, strict=True))


def _kind(unit: Unit) -> str:
    return "blocks" if unit.kind == "block" else "convolutions" if len(unit.shape) > 1 else "linear layers"


def _groups(wiring: Wiring) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for index, unit in enumerate(wiring.units):
        groups.setdefault(unit.group, []).append(index)
    return list(groups.values())
