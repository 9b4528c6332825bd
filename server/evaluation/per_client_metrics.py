"""Metrics of a federation with different networks: accuracy at each site, and the cost of each network."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.data import label, site_examples
from fedloom.clients.evaluation.accuracy import by_class, hits
from fedloom.clients.networks import Architecture, Model, architecture_of
from fedloom.conf.schema import Config
from fedloom.conf.sites import UNION, Site
from fedloom.server.evaluation.evaluator import Evaluator

OWN, LACKING = "own", "lacking"  # classes in a site's own proportions; classes that a site lacks
TIMED = 1000  # images whose time is measured


def different_networks(config: Config, sites: Sequence[Site]) -> bool:
    """Return whether the sites have different architectures."""
    return len({architecture_of(config, site) for site in sites}) > 1


def at_sites(evaluator: Evaluator, sites: Sequence[Site], models: Mapping[str, Model]) -> dict[str, float]:
    """Return means over sites of the test accuracy (0 to 1) of the network that each site would use.

    That is the shared network of its architecture or, without one, its own network.

    Returns:
        OWN: on the site's domain, with classes in the site's own proportions.
        LACKING: on classes of its domain of which it has no image. Only sites that lack classes count.
        UNION: on all domains.
    """
    accuracies: dict[str, list[float]] = {OWN: [], LACKING: [], UNION: []}
    known: dict[str, dict[str, Tensor]] = {}
    named = {site.name for site in sites}
    shared = {model.architecture: name for name in reversed(list(models)) if name not in named for model in [models[name]]}
    for site in sites:
        name = shared.get(architecture_of(evaluator.config, site), site.name)
        if name not in models:
            continue
        if name not in known:
            known[name] = class_counts(evaluator, models[name])
        right, total = known[name][label(site.spec)]
        has = torch.bincount(site_examples(evaluator.config, site).y, minlength=len(right)).double()
        shares = right / total.clamp(min=1.0)
        accuracies[OWN].append(float((has * shares).sum() / has[total > 0].sum()))
        lacks = (has == 0) & (total > 0)
        accuracies[LACKING] += [float(shares[lacks].mean())] if bool(lacks.any()) else []
        both = torch.stack(list(known[name].values())).sum((0, 2))
        accuracies[UNION].append(float(both[0] / both[1]))
    return {key: sum(values) / len(values) for key, values in accuracies.items() if values}


@torch.no_grad()
def class_counts(evaluator: Evaluator, model: Model) -> dict[str, Tensor]:
    """Return [2, classes] float64 by domain: the numbers of correctly classified and of all test examples, by class."""
    network, counts = evaluator.loaded(model), {}
    for domain in evaluator.specs if model.domains is None else model.domains:
        view, images = evaluator.head_view(network, domain), evaluator.images(domain, "test")
        right = hits(view, images, evaluator.config.evaluation.batch, evaluator.device).cpu()
        counts[domain] = torch.stack(by_class(images.y, right, model.architecture.outputs)).double()
    return counts


def costs(evaluator: Evaluator, sites: Sequence[Site], models: Mapping[str, Model]) -> dict[str, dict[str, Any]]:
    """Return the cost of each shared network, and of an ensemble of all sites' networks.

    The cost is the number of sites with the network, its parameters, the bytes that a site receives and sends in a round,
    and the seconds for 1,000 examples on this machine.
    """
    counts: dict[Architecture, int] = {}
    for site in sites:
        architecture = architecture_of(evaluator.config, site)
        counts[architecture] = counts.get(architecture, 0) + 1
    named, table = {site.name for site in sites}, dict[str, dict[str, Any]]()
    for name in models:
        if name not in named:
            model = models[name]
            numbers = sum(weight.numel() for weight in evaluator.instance(model.architecture).parameters())
            sent = 2 * sum(tensor.nbytes for tensor in model.state.values())
            table[name] = {"sites": counts.get(model.architecture, 0), "parameters": numbers, "bytes": sent,
                           "seconds": _seconds(evaluator, model)}  # fmt: skip
    if len(table) > 1:
        summed = {key: sum(cost["sites"] * cost[key] for cost in table.values()) for key in ("parameters", "seconds")}
        table["ensemble of all sites"] = {"sites": sum(counts.values()), **summed}
    return table


@torch.no_grad()
def _seconds(evaluator: Evaluator, model: Model) -> float:
    """Return the shortest of three times."""
    network, inputs = evaluator.loaded(model), model.architecture.form.zeros(TIMED).to(evaluator.device)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for part in inputs.split(evaluator.config.evaluation.batch):
            network(part).argmax(-1).cpu()
        times.append(time.perf_counter() - begin)
    return min(times)
