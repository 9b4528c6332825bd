"""Choose mixing weights and coefficients on held-out data by a small search. Never score on test data."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from torch import nn

from fedloom.conf.errors import UserError

STEPS = (0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0)
MAX_POINTS = 5000  # points of a grid

Score = Callable[[Sequence[float]], float]


def best_weights(
    make: Callable[[Sequence[float]], nn.Module], score: Callable[[nn.Module], float], number: int
) -> tuple[list[float], nn.Module]:
    """Return the weights of `number` networks whose fusion `make(weights)` scores highest, and that network.

    The weights sum to 1. The search tries STEPS for one network's share after the other, once around; the ratio of
    the others stays fixed. Of equal scores, the more even weights win.
    """
    best = [1.0 / number] * number
    network = make(best)
    highest = score(network)
    for index in range(number - 1 if number == 2 else number):
        for share in sorted(STEPS, key=lambda step: abs(step - 1.0 / number)):
            weights = _with_share(best, index, share)
            tried = make(weights)
            if (reached := score(tried)) > highest:
                best, network, highest = weights, tried, reached
    return best, network


def _with_share(weights: Sequence[float], index: int, share: float) -> list[float]:
    others = sum(weight for k, weight in enumerate(weights) if k != index)
    even = 1.0 / (len(weights) - 1)
    rest = [weight / others if others > 0 else even for weight in weights]
    return [share if k == index else (1.0 - share) * rest[k] for k in range(len(weights))]


def best_on_grid(score: Score, steps: Sequence[float], number: int) -> list[float]:
    """Return the point of steps x ... x steps (`number` times) with the highest score; of equal ones the first.

    Raise UserError if the grid has more than MAX_POINTS points.
    """
    check_grid(steps, number)
    return list(max(itertools.product(steps, repeat=number), key=score))


def check_grid(steps: Sequence[float], number: int) -> None:
    """Raise UserError if steps x ... x steps (`number` times) has more than MAX_POINTS points."""
    if len(steps) ** number > MAX_POINTS:
        raise UserError(f"a grid of {len(steps)} steps for {number} coefficients has more than {MAX_POINTS} points; "
                        "use fewer steps, or a derivative-free search")  # fmt: skip


def climb(score: Score, start: Sequence[float], low: float, high: float, evaluations: int) -> list[float]:
    """Return the point of the highest score that Powell's method reaches from `start`, between `low` and `high`.

    `evaluations` is about the number of points that it scores.
    """
    from scipy.optimize import minimize

    best = [min(max(value, low), high) for value in start]
    highest = score(best)

    def lost(point: np.ndarray) -> float:
        nonlocal best, highest
        if (reached := score(point.tolist())) > highest:
            best, highest = point.tolist(), reached
        return -reached

    bounds = [(low, high)] * len(best)
    minimize(lost, np.array(best), method="Powell", bounds=bounds, options={"maxfev": evaluations, "xtol": 0.01})
    return best
