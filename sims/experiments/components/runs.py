"""The federated runs of the tables: each is made once, measured, and erased."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedloom.clients.data import Examples, domain_specs, site_examples, test_images, to_float
from fedloom.clients.networks import HeadView, Network, architecture_of
from fedloom.clients.storage.states import read_state
from fedloom.conf import load
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.sims.experiments.components.sizes import SIZES, Settings, Size, Task
from fedloom.sims.experiments.study import Study, fingerprint
from fedloom.sims.operations.scratch_run import erased_run
from fedloom.sims.report.spread import mean_and_spread

EXPERIMENT = "components"
ANOTHER = "mlp"  # with another network, the options of the first one are dropped
UPPER = "upper bound (own, with a rotation head of its own)"


@dataclass(frozen=True)
class Measurements:
    """The measurements of a run: `accuracy` [extractor's site, head's site], and the `bytes` that a site sends in a round.

    `correlation` is that of each channel of two extractors, `permuted` the mean in the best order. `missing` and
    `missing_exchanged` are accuracies on classes that sites lack, with their own and with other sites' heads; None if no
    site lacks a class.
    """

    accuracy: Sequence[Sequence[float]]
    bytes: int
    fedavg_bytes: int
    correlation: Sequence[float]
    permuted: float
    missing: float | None = None
    missing_exchanged: float | None = None

    @property
    def own(self) -> float:
        """The mean accuracy with the sites' own heads."""
        return statistics.fmean(row[index] for index, row in enumerate(self.accuracy))

    @property
    def exchanged(self) -> float:
        """The mean accuracy with other sites' heads; NaN for a run of one site."""
        cells = [cell for index, row in enumerate(self.accuracy) for other, cell in enumerate(row) if other != index]
        return statistics.fmean(cells) if cells else math.nan


def size_of(study: Study) -> Size:
    """Return the study's preset: its tasks and settings."""
    return SIZES[study.preset]


def tasks_of(study: Study) -> Mapping[str, Task]:
    """Return the tasks that the study selects, by name."""
    return {name: task for name, task in size_of(study).tasks.items() if not study.only or name in study.only}


def first_task(study: Study) -> tuple[str, Task]:
    """Return the name and the task of the tables on details: the first one that the study selects."""
    return next(iter(tasks_of(study).items()))


def network_of(study: Study, task: str) -> dict[str, Any]:
    """Return the section `network` in the configuration of a task's runs."""
    size = size_of(study)
    return dict(load(EXPERIMENT, _lines({**size.settings, **size.tasks[task].all})).network)


def measured(study: Study, task: str, settings: Settings, seed: int) -> Measurements:
    """Run a task with `settings`, which replace the task's, and return the measurements. Saved ones are read instead."""
    size = size_of(study)
    keys = {**size.settings, **size.tasks[task].all, **_turned(settings, size.tasks[task].turns)}
    lines = [*_lines(keys), *study.overrides, f"seed={seed}"]
    name = f"{task}-{seed}-{fingerprint(lines)}"
    label = f"{task}, seed {seed}, {' '.join(f'{key}={value}' for key, value in settings.items() if key != 'sites')}"

    def make() -> dict[str, Any]:
        run = [f"run.root={study.folder / 'runs'}", f"run.name={name}", "run.overwrite=true", "baselines=[]"]
        config = _watched_last(load(EXPERIMENT, [*lines, *run]))
        with erased_run(config) as (summary, path):
            [matrix] = summary["recombination"].values()
            return {
                **{key: matrix[key] for key in ("accuracy", "bytes", "fedavg_bytes")},
                **feature_statistics(config, path),
            }

    return Measurements(**study.once(name, lines, make, label))


def each(study: Study, task: str, settings: Settings) -> list[Measurements]:
    """Return the measurements of a task with these settings, for every seed."""
    return study.each_seed(lambda seed: measured(study, task, settings, seed))


def upper_bound(study: Study, task: str) -> list[float]:
    """Return, for each seed, the mean accuracy of sites that train alone, each with its own rotation head."""
    settings = {"objective.auxiliary": ["rp"], "objective.pull": 0.0}
    sites = [{key: value for key, value in site.items() if key != "count"} for site in size_of(study).tasks[task].sites]
    runs = [each(study, task, {**settings, "sites": [site]}) for site in sites]
    return [statistics.fmean(run.own for run in of_seed) for of_seed in zip(*runs, strict=True)]


def _lines(settings: Settings) -> list[str]:
    """Return settings as overrides, whole sections before their keys. Another network replaces the experiment's."""
    lines = [f"{key}={json.dumps(settings[key])}" for key in sorted(settings)]
    return [f"network.name={ANOTHER}", *lines] if "network" in settings else lines


def _turned(settings: Settings, turns: str) -> dict[str, Any]:
    """Return the settings, with as many rotations of each image as the task has."""
    key = "objective.auxiliary"
    if turns == "one" or key not in settings:
        return dict(settings)
    return {**settings, key: [{"name": "rp", "turns": turns} if task == "rp" else task for task in settings[key]]}


def _watched_last(config: Config) -> Config:
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, every=2 * config.rounds))


def shown(results: Sequence[Measurements], *fields: str) -> list[str]:
    """Return the mean and standard deviation over seeds of each field, in %, as text; "-" for None."""
    values = [[getattr(result, field) for result in results] for field in fields]
    return ["-" if None in accuracies else mean_and_spread(accuracies) for accuracies in values]


def way(results: Sequence[Measurements], upper: Sequence[float], classes: int) -> str:
    """Return the accuracy with exchanged heads as text: in % of the way from chance to the upper bound."""
    chance = 1.0 / classes
    shares = [(result.exchanged - chance) / (top - chance) if top > chance else math.nan
              for result, top in zip(results, upper, strict=True)]  # fmt: skip
    return mean_and_spread(shares)


MAX_IMAGES = 500  # test examples of each domain whose features are compared
MAX_POSITIONS = 50_000  # of images and their pixels, of these


def feature_statistics(config: Config, folder: Path) -> dict[str, Any]:
    """Return the fields of Measurements on correlation and missing classes; placeholders for a run of one site."""
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
    """Return Pearson's correlations, float64 [c, c], of the channels of two features [n, c]; 0 for a constant channel."""
    first, second = (features.double() - features.double().mean(0) for features in (first, second))
    norms = first.norm(dim=0)[:, None] * second.norm(dim=0)[None, :]
    return torch.where(norms > 0, first.T @ second / norms.clamp(min=1e-30), 0.0)


def shared_images(config: Config) -> Tensor:
    """Return mixed test examples of all domains, the same number of each, float [n, c, h, w]."""
    parts = [test_images(config, spec).x for spec in domain_specs(config).values()]
    fewest = min(MAX_IMAGES, *(len(part) for part in parts)) if len(parts) > 1 else min(MAX_IMAGES, len(parts[0]))
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
    """Return the features [n, channels] of all images and positions, at most MAX_POSITIONS of them."""
    HeadView(network, slice(None), statistics_of).eval()  # sets the mode of BatchNorm in the network
    features = network.extractor(images)
    rows = features.movedim(1, -1).flatten(0, -2) if features.ndim == 4 else features
    keep = torch.randperm(len(rows), generator=torch_generator(0, "looks", "places"))[:MAX_POSITIONS]
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
        has = set(site_examples(config, site).y.unique().tolist())
        lacks = [label for label in images.y.unique().tolist() if label not in has]
        for other in sites if lacks else ():
            network = Network(networks[site.name].extractor, networks[other.name].head)
            hits = _right(network, images, config.evaluation.statistics)
            known = set(site_examples(config, other).y.unique().tolist())
            labels = lacks if other is site else [label for label in lacks if label in known]
            shares = [float(hits[images.y == label].float().mean()) for label in labels]
            (own if other is site else exchanged).extend(shares)
    means = {"missing": own, "missing_exchanged": exchanged}
    return {name: statistics.fmean(values) for name, values in means.items() if values}


@torch.inference_mode()
def _right(network: Network, images: Examples, statistics_of: str) -> Tensor:
    """Return which answers are right, bool [n]. Batches are random draws."""
    view, hits = HeadView(network, slice(None), statistics_of).eval(), torch.zeros(len(images), dtype=torch.bool)
    order = torch.randperm(len(images), generator=torch_generator(0, "looks", "batches"))
    for part in order.tensor_split(max(1, len(order) // 500)):
        hits[part] = view(to_float(images.x[part])).argmax(1) == images.y[part]
    return hits
