"""What a site's steps of SGD make of its gradients: some methods divide a round's change by it."""

from fedloom.clients.training.optimizers import SGD
from fedloom.clients.training.recipe import Recipe


def gradient_weight(training: Recipe, rounds: int, round: int, steps: int) -> float:
    """The sum over a round's gradients of the weight with which each enters the change of the weights.

    Step t moves by rate_t times the sum over s <= t of momentum ** (t - s) g_s, so that the change is a weighted sum of the
    gradients g_s. With a constant rate it is rate * ||a_i||_1 of FedNova (Wang et al. 2020, Sec. 4.2); without momentum
    it is rate * steps. `round` (from 1) of `rounds` says where the schedule is.
    """
    rates = [training.rate_at(rounds, round - 1 + step / steps) for step in range(steps)]
    momentum = momentum_of(training)
    assert momentum is not None  # the strategy has refused other optimisers
    return sum(rate * _geometric(momentum, step + 1) for step, rate in enumerate(rates))


def momentum_of(training: Recipe) -> float | None:
    """The momentum of the sites' SGD; None for other optimisers, and for variants whose change is another sum."""
    found = training.optimizer
    if not isinstance(found, SGD) or found.dampening or found.nesterov or found.maximize:
        return None
    return training.momentum if found.momentum is None else found.momentum


def _geometric(momentum: float, terms: int) -> float:
    return float(terms) if momentum == 1.0 else (1.0 - momentum**terms) / (1.0 - momentum)
