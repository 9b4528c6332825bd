"""Compare a fused network with its parents, without labels: how often each gives the answer of all parents together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.fusion.refit.head import mixed

FEW = 8  # different samples
MOST_COMPARED = 100  # samples that are compared with each other


@dataclass(frozen=True)
class Agreement:
    """Shares of the probe set, 0 to 1, on which a network gives the parents' joint answer.

    The joint answer is the most probable class of their mixture (fusion.refit.head.mixed).

    Attributes:
        parents: The share of each input network.
        fused: The share of the fused network.
    """

    parents: tuple[float, ...]
    fused: float

    def notes(self) -> list[str]:
        """Return a note for users if a parent gives the joint answer more often than the fused network."""
        best = max(range(len(self.parents)), key=self.parents.__getitem__)
        if self.parents[best] <= self.fused:
            return []
        return [f"on the probe set, the fused network gives the joint answer of all networks for {self.fused:.1%} of the "
                f"samples, network {best} alone for {self.parents[best]:.1%}; compare both before you use it"]  # fmt: skip


def agreement(answers: Sequence[Tensor], fused: Tensor, weights: Sequence[float]) -> Agreement:
    """Return how often networks give the joint answer.

    Args:
        answers: The logits of each input network, [k, classes].
        fused: The logits of the fused network, [k, classes].
        weights: The weight of each input network.
    """
    joint = mixed(answers, weights).argmax(dim=1)
    shares = [float((logits.argmax(dim=1) == joint).double().mean()) for logits in (*answers, fused)]
    return Agreement(tuple(shares[:-1]), shares[-1])


def few_samples(probe: Tensor) -> list[str]:
    """Return a note if the probe set [k, ...] has fewer than FEW different samples."""
    different = len(torch.unique(probe[:MOST_COMPARED].flatten(1), dim=0))
    if different >= FEW:
        return []
    return [f"the probe set has only {different} different samples: the fused network is fitted to these, so its answers on "
            "them say little; use 200 or more"]  # fmt: skip
