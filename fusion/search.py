"""Mixing weights chosen on held-out data by a small search."""

from collections.abc import Callable, Sequence

from torch import nn

STEPS = (0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0)


def best_weights(
    make: Callable[[Sequence[float]], nn.Module], score: Callable[[nn.Module], float], number: int
) -> tuple[list[float], nn.Module]:
    """The weights of `number` networks, adding up to 1, whose fusion `make(weights)` scores highest, and that network.

    One network's share after the other is tried at STEPS, the others' keeping their ratio, once around; of equal scores the
    more even weights win. Never score on test data.
    """
    best = [1.0 / number] * number
    network = make(best)
    highest = score(network)
    for place in range(number - 1 if number == 2 else number):
        for share in sorted(STEPS, key=lambda step: abs(step - 1.0 / number)):
            weights = _with_share(best, place, share)
            tried = make(weights)
            if (reached := score(tried)) > highest:
                best, network, highest = weights, tried, reached
    return best, network


def _with_share(weights: Sequence[float], place: int, share: float) -> list[float]:
    others = sum(weight for k, weight in enumerate(weights) if k != place)
    even = 1.0 / (len(weights) - 1)
    rest = [weight / others if others > 0 else even for weight in weights]
    return [share if k == place else (1.0 - share) * rest[k] for k in range(len(weights))]
