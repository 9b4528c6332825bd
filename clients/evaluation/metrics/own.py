"""A metric of the user's: a torchmetrics.Metric, or any class with `update(scores, targets)`, `compute()` and `reset()`."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.evaluation.metrics.sums import Statistic, Sums, examples, joined
from fedloom.clients.evaluation.metrics.values import Formula
from fedloom.conf.errors import UserError
from fedloom.conf.metrics import TOKENS, Facts, Named
from fedloom.conf.plugins import call, error_summary, imported, parameters

SIZES = ("num_classes", "num_labels", "num_outputs")  # parameters that receive the number of the network's outputs
Make = Callable[[], Any]


def own_metric(named: Named, kind: str, outputs: int) -> tuple[Facts, Formula, Statistic]:
    """Return a user's metric and its statistic: the sums of its states or, if they do not add up, all examples.

    Raises UserError if it cannot be made, or lacks a method.
    """
    target = imported(named.reference, f"{named.where}.name")
    if not callable(target):
        raise UserError(f"{named.where}.name: '{named.reference}' is not a class; name a subclass of torchmetrics.Metric")
    takes = {each.name for each in parameters(target)[0]}
    sizes = {name: outputs for name in SIZES if name in takes and name not in named.options}
    make = partial(call, target, named.options, sizes, named.reference, named.where)
    metric = make()
    if lacks := [name for name in ("update", "compute", "reset") if not callable(getattr(metric, name, None))]:
        raise UserError(f"{named.where}.name: '{named.reference}' has no method {lacks[0]}(); a metric needs it")
    higher = getattr(metric, "higher_is_better", None)
    facts = Facts(named.name, named.name, (kind,), higher_is_better=higher is not False)
    name, columns = f"own.{named.name}", outputs
    if states := summed_states(metric):
        statistic = Statistic(name, lambda scores, targets: _states(_updated(make, scores, targets, named), states))
        return facts, Formula((name,), lambda sums: _from_states(make, states, sums[name], named)), statistic
    statistic = Statistic(name, examples, joined)
    return facts, Formula((name,), lambda sums: _from_examples(make, sums, name, columns, kind, named)), statistic


def summed_states(metric: Any) -> list[str]:
    """Return the names of a metric's states if all of them add up over sites (dist_reduce_fx="sum"); else nothing."""
    reductions, defaults = getattr(metric, "_reductions", {}), getattr(metric, "_defaults", {})
    adds = [getattr(reduction, "__name__", "") == "dim_zero_sum" for reduction in reductions.values()]
    return list(defaults) if adds and all(adds) and all(isinstance(each, Tensor) for each in defaults.values()) else []


def _updated(make: Make, scores: Tensor, targets: Tensor, named: Named) -> Any:
    metric = make()
    try:
        metric.reset()
        metric.update(scores, targets)
    except Exception as error:
        raise UserError(f"{named.where}: '{named.reference}' failed in update() ({error_summary(error)})") from error
    return metric


def _states(metric: Any, names: list[str]) -> Tensor:
    return torch.cat([getattr(metric, name).detach().cpu().double().flatten() for name in names])


def _from_states(make: Make, names: list[str], sums: Tensor, named: Named) -> float:
    metric, begin = make(), 0
    for name in names:
        default: Tensor = getattr(metric, name)
        setattr(metric, name, sums[begin : begin + default.numel()].reshape(default.shape).to(default.dtype))
        begin += default.numel()
    metric._update_count = 1  # torchmetrics warns about a metric that has seen nothing
    return _computed(metric, named)


def _from_examples(make: Make, sums: Sums, name: str, outputs: int, kind: str, named: Named) -> float:
    table = sums[name]
    scores, targets = table[:, :outputs].float(), table[:, outputs:]
    whole = targets[:, 0].long() if kind in ("class", TOKENS) else targets.float()
    return _computed(_updated(make, scores, whole, named), named)


def _computed(metric: Any, named: Named) -> float:
    try:
        value = float(metric.compute())
    except Exception as error:
        fault = f"{named.where}: '{named.reference}': compute() must return one number ({error_summary(error)})"
        raise UserError(fault) from error
    return value if math.isfinite(value) else math.nan
