"""The total weight of the gradients in a round's change under SGD. SCAFFOLD and FedNova divide by it."""

from fedloom.clients.training.optimizers import SGD
from fedloom.clients.training.recipe import Recipe


def gradient_weight(training: Recipe, rounds: int, round: int, steps: int) -> float:
    """Return the total factor that the gradients of a round have in the network's change under SGD.

    Step t moves by rate_t times the sum over s <= t of momentum ** (t - s) g_s. The change is therefore a weighted sum of
    the gradients g_s. With a constant rate the result is rate * ||a_i||_1 of FedNova (Wang et al. 2020, Sec. 4.2). Without
    momentum it is rate * steps. `round` (from 1) of `rounds` is the position in the schedule.
    """
    rates = [training.rate_at(rounds, round - 1 + step / steps) for step in range(steps)]
    momentum = momentum_of(training)
    assert momentum is not None  # the strategy refuses other optimisers
    return sum(rate * _geometric(momentum, step + 1) for step, rate in enumerate(rates))


def momentum_of(training: Recipe) -> float | None:
    """Return the momentum of plain SGD; None for other optimisers, dampening, Nesterov's momentum or maximisation."""
    optimizer = training.optimizer
    if not isinstance(optimizer, SGD) or optimizer.dampening or optimizer.nesterov or optimizer.maximize:
        return None
    return training.momentum if optimizer.momentum is None else optimizer.momentum


def _geometric(momentum: float, terms: int) -> float:
    return float(terms) if momentum == 1.0 else (1.0 - momentum**terms) / (1.0 - momentum)
