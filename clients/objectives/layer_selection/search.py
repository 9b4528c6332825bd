"""Ways to the gradients of the M-step (LASEM, Eq. 3 and 4), and what each costs.

One step on the paper's network of 32-32-64-64 channels evaluates the four layers 2, 4, 8 and 16 times in an exact tree: 9.4
times the multiplications of one network.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedloom.clients.objectives.layer_selection.configurations import Configuration
from fedloom.clients.objectives.layer_selection.posterior import Belief
from fedloom.clients.objectives.layer_selection.tree import Tree
from fedloom.clients.training.loss import task_loss
from fedloom.conf.registry import Registry
from fedloom.conf.typed import option

FEWEST = 2  # images of an E-step: BatchNorm takes no single one
Likelihood = Callable[[Tensor], Tensor]


@dataclass
class Step:
    """A mini-batch at hand: images [n, c, h, w], labels [n] and the weights of shared layers, by name.

    `held`: the posterior of an earlier mini-batch that still counts; None: an E-step is due. `evidence`: images and labels
    for the E-step, which nobody trains on; None: it looks at the mini-batch. `smoothing`: of labels, in the M-step.
    """

    tree: Tree
    belief: Belief
    likelihood: Likelihood
    shared: Mapping[str, Tensor]
    outputs: slice
    images: Tensor
    labels: Tensor
    generator: torch.Generator
    held: Tensor | None = None
    evidence: tuple[Tensor, Tensor] | None = None
    smoothing: float = 0.0

    def losses(self, places: Tensor, images: int | None = None, evidence: bool = False) -> tuple[Tensor, Tensor]:
        """Of the first images (None: of all), or of the evidence, under the configurations at `places`, [k, n]: the losses
        to minimise, and the cross-entropies, which are the same without label smoothing. Where no gradient is asked for,
        Dropout leaves nothing out."""
        chosen = [self.belief.configurations[place] for place in places.tolist()]
        if not torch.is_grad_enabled():  # an E-step
            with without_dropout(self.tree.segments):
                return self._losses(chosen, images, evidence)
        return self._losses(chosen, images, evidence)

    def _losses(self, chosen: Sequence[Configuration], images: int | None, evidence: bool) -> tuple[Tensor, Tensor]:
        inputs, labels = self.evidence if evidence and self.evidence else (self.images[:images], self.labels[:images])
        scores = self.tree.scores(chosen, self.shared, inputs)[..., self.outputs]
        flat, wanted = scores.flatten(0, 1), labels.repeat(len(chosen))
        found = task_loss(flat, wanted, self.smoothing, reduction="none").unflatten(0, scores.shape[:2])
        if not self.smoothing:
            return found, found.detach()
        return found, task_loss(flat.detach(), wanted, 0.0, reduction="none").unflatten(0, scores.shape[:2])

    def expect(self, places: Tensor, entropies: Tensor) -> Tensor:
        """The posterior that counts: the one held, or that of the evidence or else of these cross-entropies (the E-step),
        which the prior then learns."""
        if self.held is not None:
            return self.held
        if self.evidence is not None or any(_dropouts(self.tree.segments)):
            with torch.no_grad():
                _, entropies = self.losses(places, evidence=True)
        posterior = self.belief.posterior(self.likelihood(-entropies), places)
        self.belief.learn(posterior)
        return posterior

    def weighted(self, posterior: Tensor, places: Tensor, losses: Tensor) -> Tensor:
        """The sum of the mean losses at `places`, each times its posterior: its gradient is that of Eq. 3 and 4."""
        weights = posterior[places].to(losses)
        return (weights * losses.mean(1)).sum()


def _dropouts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return (one for module in modules for one in module.modules() if isinstance(one, _DropoutNd))


@contextlib.contextmanager
def without_dropout(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, layers of Dropout leave nothing out; norms are as they were."""
    dropping = [one for one in _dropouts(modules) if one.training]
    for one in dropping:
        one.eval()
    try:
        yield
    finally:
        for one in dropping:
            one.train()


@dataclass(frozen=True)
class Search(ABC):
    """A way to find a step's loss and posterior."""

    @abstractmethod
    def step(self, step: Step) -> tuple[Tensor, Tensor]:
        """The loss whose gradient is that of Eq. 3 and 4, and the posterior [k]."""


SEARCHES: Registry[Search] = Registry("search", Search)


@SEARCHES.register("exact")
@dataclass(frozen=True)
class Exact(Search):
    """All configurations in each step, once forward and once back."""

    def step(self, step: Step) -> tuple[Tensor, Tensor]:
        places = torch.arange(len(step.belief.configurations))
        losses, entropies = step.losses(places)
        posterior = step.expect(places, entropies)
        return step.weighted(posterior, places, losses), posterior


@SEARCHES.register("pruned")
@dataclass(frozen=True)
class Pruned(Search):
    """Configurations whose prior is at most `left_out` together are left out of a step, but for one of them, each in its
    turn, so that one which has become better is found.

    Their posterior mass is at most left_out / (left_out + sum of prior x likelihood of the others), if likelihoods are
    means of probabilities, which are at most 1: the same share of the M-step's gradient is missing.
    """

    left_out: float = option(0.05, "prior probability of the configurations that a step may leave out", low=0.0, high=0.999)

    def step(self, step: Step) -> tuple[Tensor, Tensor]:
        places = step.belief.watched(self.left_out)
        if step.held is not None:
            places = torch.nonzero(step.held).flatten()
        losses, entropies = step.losses(places)
        posterior = step.expect(places, entropies)
        return step.weighted(posterior, places, losses), posterior


@SEARCHES.register("sampled")
@dataclass(frozen=True)
class Sampled(Search):
    """The E-step on a part of the batch, without gradients; the M-step on configurations drawn from the posterior, of which
    the expected gradient is that of Eq. 3 and 4."""

    part: float = option(0.2, "of a batch, for the E-step", low=0.0, high=1.0)
    draws: int = option(1, "configurations of an M-step", low=1)

    def step(self, step: Step) -> tuple[Tensor, Tensor]:
        posterior = step.held if step.belief.fixed is None else step.belief.fixed
        if posterior is None:
            everything = torch.arange(len(step.belief.configurations))
            with torch.no_grad():
                part = max(FEWEST, round(self.part * len(step.images)))
                _, entropies = step.losses(everything, part, evidence=True)
            posterior = step.expect(everything, entropies)
        if not bool(torch.isfinite(posterior).all()):  # training has diverged, which a loss that is no number tells
            return step.losses(torch.arange(1))[0].mean() * torch.nan, posterior
        drawn = torch.multinomial(posterior, self.draws, replacement=True, generator=step.generator)
        places, times = torch.unique(drawn, return_counts=True)
        losses, _ = step.losses(places)
        return (times.to(losses) / self.draws * losses.mean(1)).sum(), posterior


@dataclass
class Pace:
    """`m_steps` M-steps for each E-step: for so many mini-batches a posterior counts."""

    m_steps: int
    posterior: Tensor | None = None
    left: int = 0

    def due(self) -> Tensor | None:
        """The posterior that still counts; None if an E-step is due."""
        return self.posterior if self.left > 0 else None

    def took(self, posterior: Tensor) -> None:
        """Note a step's posterior."""
        self.left = (self.left if self.left > 0 else self.m_steps) - 1
        self.posterior = posterior
