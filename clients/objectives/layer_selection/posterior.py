"""The E-step: how probable each transfer configuration is (LASEM, Eq. 1 and 2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.objectives.layer_selection.configurations import Configuration

TIED = 1e-9  # configurations whose posteriors differ by less, as a share, are equally probable


def mean_likelihood(log_probabilities: Tensor) -> Tensor:
    """The mean probability of the images' classes, its logarithm: what the authors' code takes."""
    return torch.logsumexp(log_probabilities, -1) - torch.log(torch.tensor(float(log_probabilities.shape[-1])))


def joint_likelihood(log_probabilities: Tensor) -> Tensor:
    """The probability of all the images' classes together, its logarithm."""
    return log_probabilities.sum(-1)


LIKELIHOODS: dict[str, Callable[[Tensor], Tensor]] = {"mean": mean_likelihood, "joint": joint_likelihood}
"""Of log-probabilities [k, n] of n images' classes under k configurations: the log-likelihood of each, [k]."""


def by_winner(counts: Tensor, posterior: Tensor) -> Tensor:
    """Eq. 1: one more mini-batch for the most probable configuration; several that are equally probable divide it."""
    winners = (posterior >= posterior.max() * (1.0 - TIED)).to(counts.dtype)
    return counts + winners / winners.sum()


def by_posterior(counts: Tensor, posterior: Tensor) -> Tensor:
    """The mean of posteriors in the place of counts, which the paper names beside Eq. 1 and its code takes."""
    return counts + posterior


TASKS = "tasks"
PRIORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "counts": by_winner,
    "posteriors": by_posterior,
    TASKS: by_winner,  # the counts of all other sites come to the site's own
}


@dataclass
class Belief:
    """What a site believes of its transfer configurations, [k] in the order of `configurations`.

    `counts`: n_c of its own mini-batches; `others`: of all other sites', if the prior takes them. `fixed`: probabilities
    that stay as they are (Sec. 4.3), in the place of posteriors.
    """

    configurations: Sequence[Configuration]
    counts: Tensor
    others: Tensor
    update: Callable[[Tensor, Tensor], Tensor] = by_winner
    fixed: Tensor | None = None
    smoothing: float = 1.0

    def prior(self) -> Tensor:
        """Eq. 1, float64 [k]."""
        if self.fixed is not None:
            return self.fixed
        smoothed = self.counts + self.others + self.smoothing
        return smoothed / smoothed.sum()

    def posterior(self, log_likelihood: Tensor, places: Tensor) -> Tensor:
        """Eq. 2, float64 [k]: of the configurations at `places`, of which `log_likelihood` is; 0 for all others."""
        if self.fixed is not None:
            return self.fixed
        found = torch.zeros_like(self.counts)
        found[places] = torch.softmax(self.prior()[places].log() + log_likelihood.double().cpu(), 0)
        return found

    def learn(self, posterior: Tensor) -> None:
        """Take a mini-batch's posterior into the prior."""
        if self.fixed is None:
            self.counts = self.update(self.counts, posterior)

    def likely(self, left_out: float) -> Tensor:
        """The places of the fewest configurations whose prior is at least 1 - left_out together, in order."""
        prior = self.prior()
        order = prior.argsort(descending=True, stable=True)
        enough = int((prior[order].cumsum(0) < 1.0 - left_out).sum()) + 1
        return order[:enough].sort().values

    def watched(self, left_out: float) -> Tensor:
        """Those that are `likely`, and where they are learned one further: another one with each mini-batch that counted."""
        likely = self.likely(left_out)
        others = torch.ones(len(self.counts), dtype=torch.bool).index_fill(0, likely, False).nonzero().flatten()
        if self.fixed is not None or not len(others):
            return likely
        further = others[round(float(self.counts.sum())) % len(others)]
        return torch.cat([likely, further[None]]).sort().values

    def best(self) -> Configuration:
        """The most probable one a priori, which is what the site uses."""
        return self.configurations[int(self.prior().argmax())]


def shares(belief: Belief, posterior: Tensor) -> Tensor:
    """How probable it is of each group of layers that it is shared, [groups]."""
    return posterior @ torch.tensor(belief.configurations, dtype=posterior.dtype)
