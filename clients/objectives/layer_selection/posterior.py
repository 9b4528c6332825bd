"""The E-step: the probability of each transfer configuration (LASEM, Eq. 1 and 2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.objectives.layer_selection.configurations import Configuration

TIED = 1e-9  # posteriors that differ by a smaller share are equal


def mean_likelihood(log_probabilities: Tensor) -> Tensor:
    """Return log-likelihoods [k]: the logarithm of the mean probability of n labels, as in the authors' code."""
    return torch.logsumexp(log_probabilities, -1) - torch.log(torch.tensor(float(log_probabilities.shape[-1])))


def joint_likelihood(log_probabilities: Tensor) -> Tensor:
    """Return log-likelihoods [k]: the logarithm of the joint probability of n labels."""
    return log_probabilities.sum(-1)


LIKELIHOODS: dict[str, Callable[[Tensor], Tensor]] = {"mean": mean_likelihood, "joint": joint_likelihood}
"""By name, functions from log-probabilities [k, n] of n images' labels under k configurations to log-likelihoods [k]."""


def by_winner(counts: Tensor, posterior: Tensor) -> Tensor:
    """Return the counts [k], plus 1 for the most probable configuration (Eq. 1). Equally probable ones share the 1."""
    winners = (posterior >= posterior.max() * (1.0 - TIED)).to(counts.dtype)
    return counts + winners / winners.sum()


def by_posterior(counts: Tensor, posterior: Tensor) -> Tensor:
    """Return counts + posterior [k], an alternative to Eq. 1 that the paper mentions and its code uses."""
    return counts + posterior


TASKS = "tasks"
PRIORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "counts": by_winner,
    "posteriors": by_posterior,
    TASKS: by_winner,  # with the counts of all other sites
}


@dataclass
class Belief:
    """A site's belief about its transfer configurations: which layers to share (Lee et al. 2021).

    Attributes:
        configurations: The k configurations. All tensors are [k], in this order.
        counts: n_c, how often the site's own batches selected each configuration.
        others: The counts of all other sites, if the prior uses them; else 0.
        update: Returns the counts after a batch, from the counts before it and the batch's posterior.
        fixed: Constant probabilities that replace the posterior (Sec. 4.3); None: the posterior is computed.
        smoothing: The number that is added to every count.
    """

    configurations: Sequence[Configuration]
    counts: Tensor
    others: Tensor
    update: Callable[[Tensor, Tensor], Tensor] = by_winner
    fixed: Tensor | None = None
    smoothing: float = 1.0

    def prior(self) -> Tensor:
        """Return the prior probability of each configuration (Eq. 1), float64 [k]."""
        if self.fixed is not None:
            return self.fixed
        smoothed = self.counts + self.others + self.smoothing
        return smoothed / smoothed.sum()

    def posterior(self, log_likelihood: Tensor, indices: Tensor) -> Tensor:
        """Return the probability of each configuration after a batch (Eq. 2), float64 [k].

        `log_likelihood` belongs to the configurations with these indices. The posterior of all others is 0.
        """
        if self.fixed is not None:
            return self.fixed
        posterior = torch.zeros_like(self.counts)
        posterior[indices] = torch.softmax(self.prior()[indices].log() + log_likelihood.double().cpu(), 0)
        return posterior

    def learn(self, posterior: Tensor) -> None:
        """Update the counts with a batch's posterior."""
        if self.fixed is None:
            self.counts = self.update(self.counts, posterior)

    def likely(self, left_out: float) -> Tensor:
        """Return the sorted indices of the most probable configurations, as few as have a total prior of 1 - left_out."""
        prior = self.prior()
        order = prior.argsort(descending=True, stable=True)
        enough = int((prior[order].cumsum(0) < 1.0 - left_out).sum()) + 1
        return order[:enough].sort().values

    def watched(self, left_out: float) -> Tensor:
        """Return the indices of the `likely` configurations and, if they are learned, of one more, another each time."""
        likely = self.likely(left_out)
        others = torch.ones(len(self.counts), dtype=torch.bool).index_fill(0, likely, False).nonzero().flatten()
        if self.fixed is not None or not len(others):
            return likely
        further = others[round(float(self.counts.sum())) % len(others)]
        return torch.cat([likely, further[None]]).sort().values

    def best(self) -> Configuration:
        """Return the configuration with the largest prior, which the site uses."""
        return self.configurations[int(self.prior().argmax())]


def shares(belief: Belief, posterior: Tensor) -> Tensor:
    """Return the probability that each group of layers is shared, [groups], under a posterior [k]."""
    return posterior @ torch.tensor(belief.configurations, dtype=posterior.dtype)
