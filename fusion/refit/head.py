"""The target of a fused network's last layer, without labels: its parents' answers, weighted by their confidence."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CONFIDENCE = 2.0  # a parent's share falls by exp(-CONFIDENCE) for each nat of its answer's entropy
PENALTY = 0.1  # on the change of the weights, with inputs in standard deviations
STEPS = 20
ROUNDING = 1e-6  # nats from the mixture that count as rounding


def mixed(answers: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mixture sum_i w_i(x) p_i of class probabilities [k, classes], float64, from the parents' logits.

    w_i(x) ~ weight_i exp(-2 H(p_i)). A parent that has not seen an image's class is less sure of it, so each parent
    counts most on what it knows. If all are equally sure, this is the weighted mean.
    """
    logs = torch.stack([logits.double().log_softmax(dim=1) for logits in answers])
    entropies = -(logs.exp() * logs).sum(dim=2, keepdim=True)
    shares = torch.tensor(weights, dtype=torch.float64, device=logs.device)[:, None, None]
    shares = shares * torch.exp(-CONFIDENCE * entropies)
    return (shares * logs.exp()).sum(dim=0) / shares.sum(dim=0)


def fitted_head(inputs: Tensor, weight: Tensor, bias: Tensor, goal: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a new weight [m, d] and bias [m] that bring softmax(W x + b) near the goal [n, m] in cross-entropy.

    `inputs`: [n, d]. A ridge keeps the change of the weights small. Return None if the goal is already reached.
    """
    x = inputs.double()
    mean, spread = x.mean(dim=0), x.std(dim=0, unbiased=False).clamp(min=1e-12)
    x = (x - mean) / spread
    start = x @ (weight.double() * spread).T + weight.double() @ mean + bias.double()
    if float(F.kl_div(start.log_softmax(dim=1), goal, reduction="batchmean")) <= ROUNDING:
        return None
    change, shift = _descended(x, start, goal)
    change = change / spread
    return weight + change.to(weight), bias + (shift - change @ mean).to(bias)


def _descended(x: Tensor, start: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """Return the change of the weights [m, d] and the bias [m] with the least cross-entropy, by Newton's method."""
    from scipy.optimize import minimize

    x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    penalty = torch.full_like(x[0], PENALTY)
    penalty[-1] = 0.0  # the bias is free
    shape = goal.shape[1], x.shape[1]

    def matrix(flat: np.ndarray) -> Tensor:
        return torch.from_numpy(flat).view(shape).to(x)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        change = matrix(flat)
        log = (start + x @ change.T).log_softmax(dim=1)
        slope = (log.exp() - goal).T @ x / len(x) + penalty * change
        return float(0.5 * (penalty * change.square()).sum() - (goal * log).sum() / len(x)), slope.flatten().cpu().numpy()

    def curved(flat: np.ndarray, direction: np.ndarray) -> np.ndarray:
        chance, along = (start + x @ matrix(flat).T).softmax(dim=1), matrix(direction)
        slope = x @ along.T
        bent = chance * (slope - (chance * slope).sum(dim=1, keepdim=True))
        return (bent.T @ x / len(x) + penalty * along).flatten().cpu().numpy()

    options = {"maxiter": STEPS}
    solution = minimize(loss, np.zeros(shape).ravel(), jac=True, hessp=curved, method="Newton-CG", options=options)
    change = matrix(solution.x)
    return change[:, :-1], change[:, -1]
