"""What a fused network's last layer should say, without labels: a mixture of what its parents say, each heeded where it is sure."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CONFIDENCE = 2.0  # a parent's share falls by exp(-CONFIDENCE) for each nat of its answer's entropy
PENALTY = 0.1  # on the change of the weights, inputs in standard deviations
STEPS = 100
ROUNDING = 1e-6  # nats from the mixture that are rounding


def mixed(answers: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Class probabilities [k, classes] float64 from the parents' logits: sum_i w_i(x) p_i, w_i(x) ~ weight_i exp(-2 H(p_i)).

    A parent that has not seen an image's class is less sure of it, so that parents of different classes or skewed data are
    each heeded on what they know; where all are equally sure it is their plain mean.
    """
    shares, parts = [], []
    for logits, weight in zip(answers, weights, strict=True):
        log = logits.double().log_softmax(dim=1)
        shares.append(weight * torch.exp(CONFIDENCE * (log.exp() * log).sum(dim=1, keepdim=True)))
        parts.append(log.exp())
    return sum(share * part for share, part in zip(shares, parts, strict=True)) / sum(shares)


def fitted_head(inputs: Tensor, weight: Tensor, bias: Tensor, goal: Tensor) -> tuple[Tensor, Tensor] | None:
    """Weight [m, d] and bias [m] that bring softmax(W x + b) near to the goal [n, m] in cross-entropy, from where they are.

    inputs: [n, d]. The change of the weights is held small (ridge). None if the goal is reached already.
    """
    x = inputs.double()
    mean, spread = x.mean(dim=0), x.std(dim=0, unbiased=False).clamp(min=1e-12)
    x = (x - mean) / spread
    start = x @ (weight.double() * spread).T + weight.double() @ mean + bias.double()
    if float(F.kl_div(start.log_softmax(dim=1), goal, reduction="batchmean")) <= ROUNDING:
        return None
    change, shift = (torch.zeros(size, dtype=torch.float64, device=x.device, requires_grad=True)
                     for size in (weight.shape, bias.shape))  # fmt: skip
    solver = torch.optim.LBFGS([change, shift], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        found = F.cross_entropy(start + x @ change.T + shift, goal) + 0.5 * PENALTY * change.square().sum()
        found.backward()
        return found

    with torch.enable_grad():
        solver.step(loss)
    change, shift = change.detach() / spread, shift.detach()
    return weight + change.to(weight), bias + (shift - change @ mean).to(bias)
