"""Aggregates set right by what sites tell of them: BatchNorm's statistics, and the head in closed form.

When a site has been subtracted, the head was still made for the network that held it. The remaining sites answer sums over
their images (clients.evaluation.statistics), which are added up in exact integers; of these follow BatchNorm's running
statistics and a new head (fusion.discriminant). It is kept beside the sums, which stay as they are, for the aggregate as it
is now: the next round, and whoever is forgotten or readmitted, ends it.

Each network is asked of the sites that have its architecture. Where the inputs of several heads correspond
(`heads_share_basis`), the sums are added up over them, so that every head knows of all sites' images.
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
class Told:
    """What follows from the sites' answers. `parts`: by network, tensors in the place of its own (HEAD's are float64);
    `replies`: how many sites answered; `left`: networks that stay as they are, and why."""

    parts: Mapping[str, State]
    replies: int
    left: Mapping[str, str]


def recalibrate(context: RoundContext, models: Models, heads_share_basis: bool) -> Told:
    """Ask the participants about every aggregate, and keep what follows. Raises as `ask`."""
    answers = ask(context, models, heads_share_basis)
    for name, parts in answers.parts.items():
        context.save_server_state(KEPT + name, {key: tensor.float() for key, tensor in parts.items()})
    return answers


def ask(context: RoundContext, models: Models, heads_share_basis: bool, never: float = NEVER) -> Told:
    """Ask the participants about every aggregate. heads_share_basis: inputs of heads of one shape correspond; never: as in
    `discriminant`. UserError for networks that it cannot be done with, FailedError if nobody answers."""
    parts, sums, left, answered = dict[str, State](), dict[str, ExactSum](), dict[str, str](), set[str]()
    for name in aggregates(context, models):
        model = models[name]
        try:
            parts[name], sums[name] = _told(context, model, answered)
        except FailedError as error:
            left[name] = str(error)
    if not sums:
        raise FailedError("; ".join(f"{name}: {why}" for name, why in left.items()))
    for name, own in sums.items():
        alike = [one for one in sums.values() if one is own or (heads_share_basis and _shapes(one) == _shapes(own))]
        found = _together(alike).mean()
        weight, bias = discriminant(found[COUNT], found[SUM], found[SQUARE], never)
        parts[name] |= dict(zip(HEAD, (weight, bias), strict=True))
    return Told(parts, len(answered), left)


def check(view: View, models: Models) -> None:
    """UserError, naming the network, if there is no aggregate of which sites can tell."""
    found = aggregates(view, models)
    if not found:
        raise UserError("recalibration: its method has no aggregate; ask without --recalibrate")
    for name in found:
        model = models[name]
        if model.domains is not None:
            told = f"'{name}' is read on {', '.join(model.domains)} alone"
            raise UserError(f"recalibration: takes networks for all domains, and {told}; ask without --recalibrate")
        try:
            check_head(name, model.architecture)
        except UserError as error:
            raise UserError(f"recalibration: {error}; ask without --recalibrate") from None
    if not any(holders(view, view.sites, models[name].architecture) for name in found):
        raise UserError(f"recalibration: no site is left that has the network of {found[0]}; ask without --recalibrate")


def check_head(name: str, architecture: Architecture) -> None:
    """UserError, naming the network, if its head cannot be replaced by a discriminant."""
    if linear_head(architecture.build()) is None:
        raise UserError(f"the head of '{name}' is not one linear layer with a bias")


def _told(context: RoundContext, model: Model, answered: set[str]) -> tuple[State, ExactSum]:
    """BatchNorm's statistics and the sum of the class statistics, of the sites that have the network."""
    network = model.architecture.build()
    head, parts, sites = linear_head(network), State(), holders(context, context.participants, model.architecture)
    if head is None:
        raise UserError(f"recalibration: network '{model.architecture.options['name']}' has no linear head with a bias")
    if norms := running_norms(network):
        sizes = {size: len(norm.get_buffer("running_mean")) for size, norm in norms.items()}
        like = {key + norm: torch.zeros(size) for norm, size in sizes.items() for key in (MEAN_OF, SQUARE_OF)}
        parts = _statistics(_asked(context, MOMENTS, model.state, like, sites, answered).mean(), list(norms))
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
    """The sum of the sites' answers, weighted by their images; those that answer are noted. FailedError if none does."""
    total, expected = ExactSum(context.bits), {kind: RecordSpec(like, bounded=False, check=CHECKS[kind])}
    if not sites:
        raise FailedError("no site that has this network takes part")
    for reply in context.ask(kind, {MODEL: state}, expected, sites, metrics=["samples"]):
        try:
            total.add(reply.integers[kind], reply.samples)
        except ExactSumError as error:
            raise FailedError(f"the sites' statistics cannot be added up ({error})") from None
        answered.add(reply.site.name)
    if not total.addends:
        raise FailedError("no site that has images has answered")
    return total


def _together(sums: Sequence[ExactSum]) -> ExactSum:
    total = sums[0].copy()
    try:
        for one in sums[1:]:
            total.merge(one.totals, one.addends)
    except ExactSumError as error:
        raise FailedError(f"recalibration: the sites' statistics cannot be added up ({error})") from None
    return total


def _shapes(one: ExactSum) -> list[torch.Size]:
    return [tensor.shape for tensor in one.totals.values()]


def _statistics(found: State, norms: list[str]) -> State:
    """BatchNorms' running statistics."""
    parts: State = {}
    for norm in norms:
        mean, square = found[MEAN_OF + norm].double(), found[SQUARE_OF + norm].double()
        parts[f"{norm}.running_mean"] = mean.float()
        parts[f"{norm}.running_var"] = (square - mean.square()).clamp(min=0.0).float()
    return parts
