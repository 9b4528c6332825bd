"""Measurements on the networks of a finished run: correlation of features, and accuracy on classes that sites lack."""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedloom.clients.data import Images, domain_specs, site_images, test_images, to_float
from fedloom.clients.networks import HeadView, Network, architecture_of
from fedloom.clients.storage.states import read_state
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site

MOST = 500  # test images of each domain whose features are compared
MOST_PLACES = 50_000  # of images and their pixels, of these


def looks(config: Config, folder: Path) -> dict[str, Any]:
    """Return the other fields of Measurements; placeholders for a run of one site."""
    sites = config.roster
    networks = {site.name: _network(config, site, folder) for site in sites}
    if len(sites) < 2:
        return {"correlation": [], "permuted": 0.0}
    images = shared_images(config)
    table = correlations(*(_features(networks[site.name], images, config.evaluation.statistics) for site in sites[:2]))
    rows, columns = linear_sum_assignment(-table.numpy())
    return {
        "correlation": sorted(table.diagonal().tolist(), reverse=True),
        "permuted": float(table[rows, columns].mean()),
        **_missing(config, networks),
    }


def correlations(first: Tensor, second: Tensor) -> Tensor:
    """Return Pearson's correlations, float64 [c, c], of channels of two features [n, c]; 0 for a constant channel."""
    first, second = (features.double() - features.double().mean(0) for features in (first, second))
    norms = first.norm(dim=0)[:, None] * second.norm(dim=0)[None, :]
    return torch.where(norms > 0, first.T @ second / norms.clamp(min=1e-30), 0.0)


def shared_images(config: Config) -> Tensor:
    """Return mixed test images of all domains, the same number of each, float [n, c, h, w]."""
    parts = [test_images(config, spec).x for spec in domain_specs(config).values()]
    fewest = min(MOST, *(len(part) for part in parts)) if len(parts) > 1 else min(MOST, len(parts[0]))
    drawn = [part[torch.randperm(len(part), generator=torch_generator(config.seed, "looks"))[:fewest]] for part in parts]
    mixed = torch.cat(drawn)
    return to_float(mixed[torch.randperm(len(mixed), generator=torch_generator(config.seed, "looks", "order"))])


def _network(config: Config, site: Site, folder: Path) -> Network:
    network = architecture_of(config, site).build()
    state = read_state(folder / "states" / f"{site.name}.safetensors")
    network.load_state_dict({name: state[name].to(tensor.dtype) for name, tensor in network.state_dict().items()})
    return network.eval()


@torch.inference_mode()
def _features(network: Network, images: Tensor, statistics_of: str) -> Tensor:
    """Return the features [n, channels] of all images and positions, at most MOST_PLACES of them."""
    HeadView(network, slice(None), statistics_of).eval()  # sets the mode of BatchNorm in the network
    features = network.extractor(images)
    rows = features.movedim(1, -1).flatten(0, -2) if features.ndim == 4 else features
    keep = torch.randperm(len(rows), generator=torch_generator(0, "looks", "places"))[:MOST_PLACES]
    return rows[keep]


def _missing(config: Config, networks: Mapping[str, Network]) -> dict[str, float]:
    """Return the accuracy on classes that sites have no images of.

    `missing` is with their own heads, `missing_exchanged` with those of sites that have the class. Empty if no site lacks a
    class, or if outputs are not the domain's classes.
    """
    own: list[float] = []
    exchanged: list[float] = []
    sites = [site for site in config.roster if not site.spec.relabel]
    for site in sites:
        images = test_images(config, dataclasses.replace(site.spec, classes=[]))
        has = set(site_images(config, site).y.unique().tolist())
        lacks = [label for label in images.y.unique().tolist() if label not in has]
        for other in sites if lacks else ():
            network = Network(networks[site.name].extractor, networks[other.name].head)
            hits = _right(network, images, config.evaluation.statistics)
            known = set(site_images(config, other).y.unique().tolist())
            labels = lacks if other is site else [label for label in lacks if label in known]
            shares = [float(hits[images.y == label].float().mean()) for label in labels]
            (own if other is site else exchanged).extend(shares)
    means = {"missing": own, "missing_exchanged": exchanged}
    return {name: statistics.fmean(values) for name, values in means.items() if values}


@torch.inference_mode()
def _right(network: Network, images: Images, statistics_of: str) -> Tensor:
    """Return which answers are right, bool [n]. Batches are random draws."""
    view, hits = HeadView(network, slice(None), statistics_of).eval(), torch.zeros(len(images), dtype=torch.bool)
    order = torch.randperm(len(images), generator=torch_generator(0, "looks", "batches"))
    for part in order.tensor_split(max(1, len(order) // 500)):
        hits[part] = view(to_float(images.x[part])).argmax(1) == images.y[part]
    return hits
