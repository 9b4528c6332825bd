"""One-shot fusion without labels: networks of the same and of different data, `fuse` beside what is published."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError, unknown
from fedloom.conf.formatting import count
from fedloom.fusion.baselines import Ensemble, naive_average
from fedloom.fusion.cla_ot.repair import recompute_statistics
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from fedloom.sims.experiments import fusion_pairs
from fedloom.sims.experiments.comparators import COMPARATORS
from fedloom.sims.experiments.dot_plot import draw
from fedloom.sims.experiments.fusion_pairs import FOLDER, accuracy_of, parents, probe
from fedloom.sims.experiments.kept import slug
from fedloom.sims.experiments.study import Study
from fedloom.sims.experiments.table_files import write
from fedloom.sims.report.page import Picture
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

INTO, DEPTH = 1, 0  # places among the parents
PARTS = ("test", "validation")
Found = Mapping[str, Mapping[str, Any]]  # of a pair and seed: by method, {"accuracy": ..., "seconds": ...}


@dataclass(frozen=True)
class Method:
    """A row of the table: (networks, probe images) -> the network, None where there is no such one. `options`: settings of
    `fuse` that are not the default's; None: it is another method."""

    make: Callable[[list[nn.Module], Tensor], nn.Module | None]
    options: Mapping[str, Any] | None = None

    @property
    def facts(self) -> Any:
        """All settings, as JSON has them: what a result on disk holds for."""
        return self.options is not None and json.loads(json.dumps(asdict(replace(FusionSettings(), **self.options))))


@dataclass(frozen=True)
class Request:
    """What is measured: `pairs` and `methods` by name, on the first `most` (0: all) images of `part`."""

    pairs: tuple[str, ...]
    methods: tuple[str, ...]
    part: str = "test"
    most: int = 0


def _parent(index: int) -> Method:
    return Method(lambda networks, images: networks[index] if index < len(networks) else None)


def _naive(networks: list[nn.Module], images: Tensor) -> nn.Module:
    mean = naive_average(_fuse(networks, images, {"repair": False, "refit": "none"}).balanced)
    recompute_statistics(mean, [images])
    return mean


def _fuse(networks: list[nn.Module], images: Tensor, options: Mapping[str, Any], alone: bool = False) -> Any:
    settings = replace(FusionSettings(), **options)
    weights = [float(index == INTO) for index in range(len(networks))] if alone else None
    return fuse(networks, into=INTO, depth=DEPTH, probe=images, weights=weights, settings=settings)


def _fused(options: Mapping[str, Any], alone: bool = False) -> Method:
    return Method(lambda networks, images: _fuse(networks, images, options, alone).network, options)


def _published(name: str) -> Method:
    return Method(lambda networks, images: COMPARATORS[name](networks, INTO, DEPTH, images))


SETTINGS: dict[str, dict[str, Any]] = {
    "fuse, no refit": {"refit": "none"},
    "fuse, refit by plans": {"refit": "plans"},
    "fuse, refit by regression": {"refit": "regression"},
    "fuse": {},
    "fuse, width 1.5": {"width": 1.5},
}
METHODS: dict[str, Method] = {
    **{f"parent {place + 1}": _parent(place) for place in range(4)},
    "ensemble": Method(lambda networks, images: Ensemble(networks)),
    "naive average": Method(_naive),
    **{name: _fused(options) for name, options in SETTINGS.items()},
    "control: parent 2 alone": _fused({"refit": "regression"}, alone=True),
    **{name: _published(name) for name in COMPARATORS},
}
BEST = "best parent"
NOTE = (
    "Accuracy in % on {images}, one-shot, mean ± standard deviation over seeds; parent 1 gives the depth, parent 2 the "
    "widths. Best parent: the highest of each seed. No labels are used; probe images, that no parent saw: 200 for parents "
    "of the same data, 1,000 for the others. naive average: of networks brought to one depth, BatchNorm measured again. -: "
    "the method does not take such networks."
)


def reproduce(preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
    """Train all parents with every seed (networks and results on disk are taken as they are), fuse, write tables.

    `overrides`: pairs=vgg,resnet and methods=PLeaS;RegMean measure these alone, most=2000 on so many images, part=validation
    on images by which settings may be chosen. Returns the folder. Raises UserError for another preset or override.
    """
    if preset != "cpu":
        raise UserError("reproduce fusion: takes --preset cpu")
    request = _requested(overrides)
    torch.set_num_threads(1)
    study = Study(preset, FOLDER, quiet)
    results = {name: [_of_seed(study, request, name, seed) for seed in range(seeds)] for name in request.pairs}
    accuracies = {name: [_accuracies(found) for found in each] for name, each in results.items()}
    note = NOTE.format(images=f"{f'the first {request.most}' if request.most else 'all'} {request.part} images")
    tables = [_table(f"One-shot fusion, {count(seeds, 'seed')}", accuracies, mean_and_spread, note),
              _table("Seconds", _seconds(results), _mean_seconds, "Of making the network, on one thread.")]  # fmt: skip
    pictures = [Picture(_drawn(accuracies, names, FOLDER / f"{kind}.png"), note) for kind, names in _kinds(request.pairs)]
    write(FOLDER, "One-shot fusion without labels", "", [*pictures, *tables])
    return FOLDER


def _of_seed(study: Study, request: Request, pair: str, seed: int) -> dict[str, Any]:
    return {name: _result(study, request, pair, seed, name) for name in request.methods}


def _result(study: Study, request: Request, pair: str, seed: int, name: str) -> dict[str, Any]:
    """A method's result from disk, if it was measured with the same settings, or measured and put there."""

    def line(result: Mapping[str, Any]) -> str:
        reached = result["refused"] or f"{100 * result['accuracy']:.1f} % in {result['seconds']:.1f} s"
        return f"{pair} seed {seed}: {name}: {reached}"

    file = f"{request.part}-{request.most or 'all'}/{pair}-{seed}-{slug(name)}"
    return study.once(file, METHODS[name].facts, lambda: measured(request, pair, seed, name), line)


def measured(request: Request, pair: str, seed: int, name: str) -> dict[str, Any]:
    """Accuracy (a fraction; None where there is no such network) and seconds of making it; `refused`: why there is none."""
    networks, images = parents(pair, seed), probe(pair, seed)
    begin = time.perf_counter()
    try:
        network = METHODS[name].make(networks, images)
    except UserError as error:
        return {"accuracy": None, "seconds": None, "refused": str(error)}
    seconds = time.perf_counter() - begin
    if network is None:
        return {"accuracy": None, "seconds": None, "refused": "no such parent"}
    return {"accuracy": accuracy_of(network, pair, seed, request.part, request.most), "seconds": seconds, "refused": ""}


def _accuracies(results: Found) -> dict[str, float]:
    """By method, where there is a network, and the best parent's."""
    reached = {name: row["accuracy"] for name, row in results.items() if row["accuracy"] is not None}
    own = [reached[name] for name in reached if name.startswith("parent ")]
    rows = {name: reached[name] for name in reached if name.startswith("parent ")}
    return {**rows, **({BEST: max(own)} if own else {}), **{name: reached[name] for name in reached if name not in rows}}


def _seconds(results: Mapping[str, Sequence[Found]]) -> dict[str, list[dict[str, float]]]:
    made = [name for name in METHODS if not name.startswith(("parent ", "ensemble"))]
    return {pair: [{name: found[name]["seconds"] for name in made if name in found and found[name]["accuracy"] is not None}
                   for found in each] for pair, each in results.items()}  # fmt: skip


def _mean_seconds(seconds: Sequence[float]) -> str:
    return f"{sum(seconds) / len(seconds):.1f}"


def _table(title: str, results: Mapping[str, Sequence[Mapping[str, float]]], shown: Callable[[list[float]], str],
           note: str) -> Table:  # fmt: skip
    """A row for each method, a column for each pair."""
    order = [*(f"parent {index + 1}" for index in range(4)), BEST, *METHODS]
    there = {name for each in results.values() for one in each for name in one}
    rows = []
    for name in dict.fromkeys(order):
        if name in there:
            values = [[one[name] for one in each if name in one] for each in results.values()]
            rows.append([name, *(shown(each) if each else "-" for each in values)])
    return Table(title, ["method", *results], rows, note)


def _kinds(pairs: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Pairs of the same data and those of different data, for two pictures."""
    same = [name for name in pairs if not fusion_pairs.PAIRS[name].split]
    return [(kind, names) for kind, names in (("same", same), ("different", [n for n in pairs if n not in same])) if names]


def _drawn(results: Mapping[str, Sequence[Mapping[str, float]]], pairs: Sequence[str], path: Path) -> Path:
    def shown(reached: Mapping[str, float]) -> dict[str, Any]:
        return {name: {"accuracy": [value]} for name, value in reached.items() if not name.startswith("parent ")}

    chosen = {pair: [shown(reached) for reached in results[pair]] for pair in pairs}
    return draw(chosen, ["one-shot"], path)


def _requested(overrides: Sequence[str]) -> Request:
    request = Request(tuple(fusion_pairs.PAIRS), tuple(METHODS))
    for word in overrides:
        key, _, text = word.partition("=")
        if key not in TAKES:
            raise UserError(f"override '{word}': takes {', '.join(f'{name}=...' for name in TAKES)}")
        request = replace(request, **{key: TAKES[key](text)})
    return request


def _names(text: str, kind: str, separator: str, known: Mapping[str, Any]) -> tuple[str, ...]:
    names = tuple(text.split(separator))
    for name in names:
        if name not in known:
            raise unknown(kind, name, list(known))
    return names


def _part(text: str) -> str:
    if text not in PARTS:
        raise UserError(f"override 'part={text}': takes one of: {', '.join(PARTS)}")
    return text


def _number(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"override 'most={text}': takes a number of images, or 0 for all")
    return int(text)


TAKES: dict[str, Callable[[str], Any]] = {
    "pairs": lambda text: _names(text, "pair", ",", fusion_pairs.PAIRS),
    "methods": lambda text: _names(text, "method", ";", METHODS),
    "part": _part,
    "most": _number,
}
