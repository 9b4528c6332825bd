"""Recalibrate aggregates with statistics from the sites: BatchNorm's statistics, and the head in closed form.

After a site is subtracted, the head still fits the network that contained it. The remaining sites send sums over their
images (clients.evaluation.statistics), which are added up in exact integers. From these follow BatchNorm's running
statistics and a new head (fusion.discriminant). They are stored next to the sums, which stay unchanged. They are valid for
the current aggregate, until the next round or until a site is forgotten or readmitted.

The sites with a network's architecture are asked about it. If the inputs of several heads correspond (`heads_share_basis`),
the sums of all of them are added up, so that every head uses all sites' images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedloom.clients.evaluation.statistics import (
    CHECKS,
    CLASS_STATISTICS,
    COUNT,
    MEAN_OF,
    MOMENTS,
    SQUARE,
    SQUARE_OF,
    SUM,
    linear_head,
    running_norms,
)
from fedloom.clients.networks import Architecture, Model
from fedloom.clients.protocol.messages import MODEL
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.metrics import CLASS, TARGETS
from fedloom.conf.sites import Site
from fedloom.fusion.discriminant import NEVER, discriminant
from fedloom.fusion.exact import ExactSum, ExactSumError
from fedloom.fusion.state import State
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.recalibrated import KEPT, aggregates, holders
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import Models, View

HEAD = "head.weight", "head.bias"


@dataclass(frozen=True)
class Statistics:
    """The result of the sites' answers.

    `parts`: by network, tensors that replace its own (HEAD's are float64). `replies`: how many sites answered. `left`:
    networks that stay unchanged, and why.
    """

    parts: Mapping[str, State]
    replies: int
    left: Mapping[str, str]


def recalibrate(context: RoundContext, models: Models, heads_share_basis: bool) -> Statistics:
    """Compute every aggregate's new BatchNorm statistics and head with `ask`, and store them. Raises as `ask`."""
    answers = ask(context, models, heads_share_basis)
    for name, parts in answers.parts.items():
        context.save_server_state(KEPT + name, {key: tensor.float() for key, tensor in parts.items()})
    return answers


def ask(context: RoundContext, models: Models, heads_share_basis: bool, never: float = NEVER) -> Statistics:
    """Ask the participants for statistics, and compute each aggregate's new head and BatchNorm statistics from them.

    Args:
        context: The round.
        models: The method's networks.
        heads_share_basis: Whether heads of the same shape read the same features, so that their statistics can be added.
        never: As in fusion.discriminant.discriminant.

    Raises:
        UserError: A network cannot be recalibrated.
        FailedError: No site answers.
    """
    parts, sums, skipped, answered = dict[str, State](), dict[str, ExactSum](), dict[str, str](), set[str]()
    for name in aggregates(context, models):
        model = models[name]
        try:
            parts[name], sums[name] = _of_sites(context, model, answered)
        except FailedError as error:
            skipped[name] = str(error)
    if not sums:
        raise FailedError("; ".join(f"{name}: {why}" for name, why in skipped.items()))
    for name, own in sums.items():
        added = [total for total in sums.values() if total is own or (heads_share_basis and _shapes(total) == _shapes(own))]
        mean = _together(added).mean()
        weight, bias = discriminant(mean[COUNT], mean[SUM], mean[SQUARE], never)
        parts[name] |= dict(zip(HEAD, (weight, bias), strict=True))
    return Statistics(parts, len(answered), skipped)


def check(view: View, models: Models) -> None:
    """Raise UserError unless sites can recalibrate the aggregates, naming the network that prevents it."""
    names = aggregates(view, models)
    if not names:
        raise UserError("recalibration: the method has no aggregate; leave --recalibrate out")
    for name in names:
        model = models[name]
        if model.domains is not None:
            limit = f"'{name}' is only for {', '.join(model.domains)}"
            raise UserError(f"recalibration: needs networks for all domains, and {limit}; leave --recalibrate out")
        try:
            check_head(name, model.architecture, view.experiment.task)
        except UserError as error:
            raise UserError(f"recalibration: {error}; leave --recalibrate out") from None
    if not any(holders(view, view.sites, models[name].architecture) for name in names):
        raise UserError(f"recalibration: no remaining site has the network of {names[0]}; leave --recalibrate out")


def check_head(name: str, architecture: Architecture, task: str) -> None:
    """Raise UserError unless the targets are classes and the network's head is one linear layer with a bias."""
    if task != CLASS:
        raise UserError(f"heads are computed for classes only, but the targets here are {TARGETS[task]}")
    if linear_head(architecture.build()) is None:
        raise UserError(f"the head of '{name}' is not one linear layer with a bias")


def _of_sites(context: RoundContext, model: Model, answered: set[str]) -> tuple[State, ExactSum]:
    """Return BatchNorm's statistics, and the sum of the class statistics, from the sites that have the network."""
    network = model.architecture.build()
    head, parts, sites = linear_head(network), State(), holders(context, context.participants, model.architecture)
    if head is None:
        raise UserError(f"recalibration: the network '{model.architecture.options['name']}' has no linear head with a bias")
    if norms := running_norms(network):
        sizes = {size: len(norm.get_buffer("running_mean")) for size, norm in norms.items()}
        like = {key + norm: torch.zeros(size) for norm, size in sizes.items() for key in (MEAN_OF, SQUARE_OF)}
        parts = _running_statistics(_asked(context, MOMENTS, model.state, like, sites, answered).mean(), list(norms))
    like = {COUNT: torch.zeros(head.out_features), SUM: torch.zeros(head.out_features, head.in_features),
            SQUARE: torch.zeros(head.in_features, head.in_features)}  # fmt: skip
    return parts, _asked(context, CLASS_STATISTICS, {**model.state, **parts}, like, sites, answered)


def _asked(
    context: RoundContext,
    kind: str,
    state: State,
    like: Mapping[str, torch.Tensor],
    sites: Sequence[Site],
    answered: set[str],
) -> ExactSum:
    """Return the sum of the sites' answers, weighted by their images, and add the sites to `answered`.

    Raises FailedError if no site answers.
    """
    total, expected = ExactSum(context.bits), {kind: RecordSpec(like, bounded=False, check=CHECKS[kind])}
    if not sites:
        raise FailedError("no participating site has this network")
    for reply in context.ask(kind, {MODEL: state}, expected, sites, metrics=["samples"]):
        try:
            total.add(reply.integers[kind], reply.samples)
        except ExactSumError as error:
            raise FailedError(f"the sites' statistics cannot be added up ({error})") from None
        answered.add(reply.site.name)
    if not total.addends:
        raise FailedError("no site with images has answered")
    return total


def _together(sums: Sequence[ExactSum]) -> ExactSum:
    total = sums[0].copy()
    try:
        for other in sums[1:]:
            total.merge(other.totals, other.addends)
    except ExactSumError as error:
        raise FailedError(f"recalibration: the sites' statistics cannot be added up ({error})") from None
    return total


def _shapes(total: ExactSum) -> list[torch.Size]:
    return [tensor.shape for tensor in total.totals.values()]


def _running_statistics(means: State, norms: list[str]) -> State:
    """Return the BatchNorm layers' running statistics."""
    parts: State = {}
    for norm in norms:
        mean, square = means[MEAN_OF + norm].double(), means[SQUARE_OF + norm].double()
        parts[f"{norm}.running_mean"] = mean.float()
        parts[f"{norm}.running_var"] = (square - mean.square()).clamp(min=0.0).float()
    return parts
