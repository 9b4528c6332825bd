"""Searches: ways to compute the gradients of the M-step (LASEM, Eq. 3 and 4).

On the paper's network with 32-32-64-64 channels, an exact step evaluates the four layers 2, 4, 8 and 16 times. This takes
9.4 times the multiplications of one network.
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

MIN_BATCH = 2  # images of an E-step: BatchNorm needs more than one
Likelihood = Callable[[Tensor], Tensor]


@dataclass
class Step:
    """The inputs of one optimiser step of layer selection.

    Attributes:
        tree: The network's segments for all configurations.
        belief: The site's belief about the configurations.
        likelihood: The log-likelihood of a batch, from the cross-entropies of its images.
        shared: The shared layers' weights, by name.
        outputs: The outputs of the site's classes.
        images: The batch, [n, c, h, w].
        labels: Its labels, [n].
        generator: Draws configurations.
        held: The posterior of an earlier batch that is still valid; None: an E-step is due.
        evidence: Held-out images and labels for the E-step; None: it uses the batch.
        smoothing: Label smoothing in the M-step.
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

    def losses(self, indices: Tensor, images: int | None = None, evidence: bool = False) -> tuple[Tensor, Tensor]:
        """Return losses with label smoothing, and cross-entropies without it, both [k, n], for k configurations.

        `images`: how many images of the batch to use; None: all. `evidence`: use the held-out images if there are any.
        Without gradients (an E-step), Dropout is off.
        """
        chosen = [self.belief.configurations[index] for index in indices.tolist()]
        if not torch.is_grad_enabled():  # an E-step
            with without_dropout(self.tree.segments):
                return self._losses(chosen, images, evidence)
        return self._losses(chosen, images, evidence)

    def _losses(self, chosen: Sequence[Configuration], images: int | None, evidence: bool) -> tuple[Tensor, Tensor]:
        inputs, labels = self.evidence if evidence and self.evidence else (self.images[:images], self.labels[:images])
        scores = self.tree.scores(chosen, self.shared, inputs)[..., self.outputs]
        flat, targets = scores.flatten(0, 1), labels.repeat(len(chosen))
        losses = task_loss(flat, targets, self.smoothing, reduction="none").unflatten(0, scores.shape[:2])
        if not self.smoothing:
            return losses, losses.detach()
        return losses, task_loss(flat.detach(), targets, 0.0, reduction="none").unflatten(0, scores.shape[:2])

    def expect(self, indices: Tensor, entropies: Tensor) -> Tensor:
        """Return the valid posterior: `held`, or else the result of an E-step, which also updates the prior.

        The E-step uses the evidence, or else these cross-entropies.
        """
        if self.held is not None:
            return self.held
        if self.evidence is not None or any(_dropouts(self.tree.segments)):
            with torch.no_grad():
                _, entropies = self.losses(indices, evidence=True)
        posterior = self.belief.posterior(self.likelihood(-entropies), indices)
        self.belief.learn(posterior)
        return posterior

    def weighted(self, posterior: Tensor, indices: Tensor, losses: Tensor) -> Tensor:
        """Return the sum over configurations of posterior * mean loss, a scalar. Its gradient is that of Eq. 3 and 4."""
        weights = posterior[indices].to(losses)
        return (weights * losses.mean(1)).sum()


def _dropouts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return (layer for module in modules for layer in module.modules() if isinstance(layer, _DropoutNd))


@contextlib.contextmanager
def without_dropout(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Enter a context where Dropout layers are off. Norm layers stay unchanged."""
    dropping = [layer for layer in _dropouts(modules) if layer.training]
    for layer in dropping:
        layer.eval()
    try:
        yield
    finally:
        for layer in dropping:
            layer.train()


@dataclass(frozen=True)
class Search(ABC):
    """Base class of searches: a way to compute a step's loss and posterior."""

    @abstractmethod
    def step(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return a loss with the gradient of Eq. 3 and 4, and the posterior [k]."""


SEARCHES: Registry[Search] = Registry("search", Search)


@SEARCHES.register("exact")
@dataclass(frozen=True)
class Exact(Search):
    """Evaluates all configurations in each step, once forward and once backward."""

    def step(self, step: Step) -> tuple[Tensor, Tensor]:
        indices = torch.arange(len(step.belief.configurations))
        losses, entropies = step.losses(indices)
        posterior = step.expect(indices, entropies)
        return step.weighted(posterior, indices, losses), posterior


@SEARCHES.register("pruned")
@dataclass(frozen=True)
class Pruned(Search):
    """Omits the least probable configurations from a step, except one of them in rotation, to notice if it improves.

    If likelihoods are mean probabilities, the omitted posterior mass is at most left_out / (left_out + sum of prior x
    likelihood of the others). The same share of the M-step's gradient is missing.
    """

    left_out: float = option(0.05, "total prior of the configurations that a step may omit", low=0.0, high=0.999)

    def step(self, step: Step) -> tuple[Tensor, Tensor]:
        indices = step.belief.watched(self.left_out)
        if step.held is not None:
            indices = torch.nonzero(step.held).flatten()
        losses, entropies = step.losses(indices)
        posterior = step.expect(indices, entropies)
        return step.weighted(posterior, indices, losses), posterior


@SEARCHES.register("sampled")
@dataclass(frozen=True)
class Sampled(Search):
    """E-step on a part of the batch, without gradients; M-step on configurations drawn from the posterior.

    The expected gradient is that of Eq. 3 and 4.
    """

    part: float = option(0.2, "share of a batch that the E-step uses", low=0.0, high=1.0)
    draws: int = option(1, "number of configurations drawn for an M-step", low=1)

    def step(self, step: Step) -> tuple[Tensor, Tensor]:
        posterior = step.held if step.belief.fixed is None else step.belief.fixed
        if posterior is None:
            everything = torch.arange(len(step.belief.configurations))
            with torch.no_grad():
                part = max(MIN_BATCH, round(self.part * len(step.images)))
                _, entropies = step.losses(everything, part, evidence=True)
            posterior = step.expect(everything, entropies)
        if not bool(torch.isfinite(posterior).all()):  # training has diverged: a loss of NaN reports it
            return step.losses(torch.arange(1))[0].mean() * torch.nan, posterior
        drawn = torch.multinomial(posterior, self.draws, replacement=True, generator=step.generator)
        indices, times = torch.unique(drawn, return_counts=True)
        losses, _ = step.losses(indices)
        return (times.to(losses) / self.draws * losses.mean(1)).sum(), posterior


@dataclass
class Pace:
    """A schedule of `m_steps` M-steps per E-step: each posterior is valid for this many batches."""

    m_steps: int
    posterior: Tensor | None = None
    left: int = 0

    def due(self) -> Tensor | None:
        """Return the last posterior while it is valid; None if the next batch needs an E-step."""
        return self.posterior if self.left > 0 else None

    def took(self, posterior: Tensor) -> None:
        """Store the posterior that a step used, and count the step."""
        self.left = (self.left if self.left > 0 else self.m_steps) - 1
        self.posterior = posterior
