"""What the channels of a fused network should do, computed from the channels of the input networks.

`Planned` and `Regressed` write a mixture into the basis of one network; `Selected` uses channels unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedloom.fusion.cla_ot.plans import Body
from fedloom.fusion.graph.channels import Wiring
from fedloom.fusion.refit.selection import Choice

RIDGE = 1e-2  # relative to the mean variance, if one network's channels are regressed on another's


class Mixture(Protocol):
    """A rule for what the fused network's channels of an axis should do, from those of all networks."""

    def __call__(self, axis: int, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Return the target [m, rows], or None, from `parts` [n_i, rows] (None: the network lacks the axis)."""
        ...

    def notes(self, into: int) -> list[str]:
        """Return notes for users: what is imitated."""
        ...


@dataclass(frozen=True, eq=False)
class Selected:
    """Targets: the values of the selected channels, unchanged; zero for a network that lacks the layer."""

    choices: Mapping[int, Choice]
    order: Sequence[int]  # of the networks in the choices
    weights: Sequence[float]  # of all networks

    def notes(self, into: int) -> list[str]:
        """Return a note for users: the number of channels from each network."""
        taken = [choice.taken() for choice in self.choices.values()]
        counts = {index: sum(each[k] for each in taken) for k, index in enumerate(self.order)}
        texts = ", ".join(f"{counts[index]:,} of network {index}" for index in sorted(counts))
        return [f"refit by selection: takes the hidden channels {texts}; the last layer imitates {_described(self.weights)}"]

    def __call__(self, axis: int, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Return the selected channels, [m, rows]."""
        parts = [parts[index] for index in self.order]
        some = next((part for part in parts if part is not None), None)
        if some is None or axis not in self.choices:
            return None
        complete = [some.new_zeros(size, some.shape[1]) if part is None else part
                 for size, part in zip(self.choices[axis].sizes, parts, strict=True)]  # fmt: skip
        return torch.cat(complete)[self.choices[axis].chosen]


@dataclass(frozen=True, eq=False)
class Planned:
    """Targets: the weighted mean of all networks' channels, moved by plans ([n, m] by network and axis; none: unmoved)."""

    plans: Sequence[Mapping[int, Tensor]]
    weights: Sequence[float]

    def __call__(self, axis: int, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Return the mean of the moved channels, [m, rows]."""
        return _mean(self.weights, [self.moved(axis, index, part) for index, part in enumerate(parts)])

    def notes(self, into: int) -> list[str]:
        """Return a note for users: the networks' weights."""
        return [f"refit by plans: every layer imitates {_described(self.weights)}, in the channels of network {into}"]

    def moved(self, axis: int, index: int, part: Tensor | None) -> Tensor | None:
        """Return a network's channels in the order of the network `into`: plan.T @ part.

        Args:
            axis: The axis of channels, whose plan applies.
            index: The network.
            part: Its channels on the probe, [n, rows]; None: it has none.

        Returns:
            [m, rows]; `part` itself without a plan.
        """
        plan = self.plans[index].get(axis)
        return part if part is None or plan is None else plan.to(part).T @ part


@dataclass(frozen=True, eq=False)
class Regressed:
    """Targets: the weighted mean of `into`'s channels and of their ridge regressions on the other networks' channels.

    The regression starts from the plans, and equals them where the others' channels do not vary.
    """

    planned: Planned
    into: int

    def __call__(self, axis: int, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Return the mean, [m, rows]."""
        goal = parts[self.into]
        if goal is None:
            return self.planned(axis, parts)
        return _mean(self.planned.weights, [self._regressed(axis, index, part, goal) for index, part in enumerate(parts)])

    def notes(self, into: int) -> list[str]:
        """Return a note for users: the networks' weights."""
        description = f"every layer imitates {_described(self.planned.weights)}, in the channels of network {into}"
        return [f"refit by regression: {description}"]

    def _regressed(self, axis: int, index: int, part: Tensor | None, goal: Tensor) -> Tensor | None:
        moved = self.planned.moved(axis, index, part)
        if part is None or moved is None or index == self.into:
            return part
        mean, lack = part.mean(1, keepdim=True), goal - moved
        x = (part - mean).double()
        gram = x @ x.T
        gram.diagonal().add_(RIDGE * gram.diagonal().mean() + 1e-12)
        change = torch.linalg.solve(gram, x @ (lack - lack.mean(1, keepdim=True)).double().T)
        return moved + (change.T @ x).to(part) + lack.mean(1, keepdim=True)


def _described(weights: Sequence[float]) -> str:
    used = [index for index, weight in enumerate(weights) if weight > 0.0]
    if len(used) == 1:
        return f"network {used[0]} alone"
    return "a mixture of all, " + ", ".join(f"{weights[index]:.2f} of network {index}" for index in used)


def _mean(weights: Sequence[float], parts: Sequence[Tensor | None]) -> Tensor | None:
    pairs = [(weight, part) for weight, part in zip(weights, parts, strict=True) if part is not None and weight > 0.0]
    total = sum(weight for weight, _ in pairs)
    return torch.stack([part * (weight / total) for weight, part in pairs]).sum(0) if pairs else None


class Targets:
    """The values that a fused network's nodes should have on the probe set."""

    def __init__(self, bodies: Sequence[Body], mixture: Mixture, weights: Sequence[float], fused: Wiring) -> None:
        self.bodies, self.mixture, self.weights, self.fused = bodies, mixture, weights, fused

    def at(self, node: str) -> Tensor | None:
        """Return a node's target [rows, channels], in the fused network's order; None if no network has the node."""
        values: Tensor | None = None
        layout = self.fused.layouts[node]
        size = max(int(entries.max()) for entries in layout.entries.values()) + 1
        for axis, entries in layout.entries.items():
            for copy, own in enumerate(entries.T):
                parts = [_part(body, node, axis, copy) for body in self.bodies]
                mixed = _mean(self.weights, parts) if self.fused.axes[axis].fixed else self.mixture(axis, parts)
                if mixed is None:
                    return None
                values = mixed.new_zeros(mixed.shape[1], size) if values is None else values
                values[:, own] = mixed.T
        return values

    def answers(self, node: str) -> list[Tensor]:
        """Return all networks' values at a node (the last layer's answers), [k, classes] each."""
        return [body.values[node].T for body in self.bodies]


def _part(body: Body, node: str, axis: int, copy: int) -> Tensor | None:
    if node not in body.values:
        return None
    layout = body.wiring.layouts[node]
    return body.values[node][layout.entries[axis][:, copy]]
