"""One-shot fusion without labels: `fuse` and published methods, on networks of the same and of different data."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedloom.conf.errors import UserError, unknown
from fedloom.fusion.baselines import Ensemble, naive_average
from fedloom.fusion.cla_ot.repair import recompute_statistics
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from fedloom.sims.experiments import fusion_pairs
from fedloom.sims.experiments.comparators import COMPARATORS
from fedloom.sims.experiments.fusion_pairs import accuracy_of, parents, probe
from fedloom.sims.experiments.plots import dots
from fedloom.sims.experiments.study import Reproduction, Study
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

INTO, DEPTH = 1, 0  # places among the parents
PARTS = ("test", "validation")
PARENTS = ("parent 1", "parent 2", "parent 3", "parent 4")
Results = Mapping[str, Sequence[Mapping[str, float]]]  # by pair and seed: by method, where there is a network


@dataclass(frozen=True)
class Method:
    """A row of the table. `make` returns a network from the parents and the probe images, or None if it cannot.

    `options` are the settings of `fuse` that differ from the defaults; None for other methods.
    """

    make: Callable[[list[nn.Module], Tensor], nn.Module | None]
    options: Mapping[str, Any] | None = None

    @property
    def facts(self) -> Any:
        """The complete settings of `fuse`, as a saved result depends on them; False for other methods."""
        return self.options is not None and replace(FusionSettings(), **self.options)


@dataclass(frozen=True)
class Request:
    """What to measure: pairs of parents, methods, and the images for the accuracy, the first `most` (0: all) of `part`."""

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


METHODS: dict[str, Method] = {
    **{name: _parent(index) for index, name in enumerate(PARENTS)},
    "ensemble": Method(lambda networks, images: Ensemble(networks)),
    "naive average": Method(_naive),
    "fuse, no refit": _fused({"refit": "none"}),
    "fuse, refit by plans": _fused({"refit": "plans"}),
    "fuse, refit by regression": _fused({"refit": "regression"}),
    "fuse": _fused({}),
    "fuse, width 1.5": _fused({"width": 1.5}),
    "fuse, distilled": _fused({"distillation": 300}),
    "control: parent 2 alone": _fused({"refit": "regression"}, alone=True),
    **{name: _published(name) for name in COMPARATORS},
}
BEST = "best parent"
NOTE = (
    "Accuracy in % on {images}, one-shot, mean ± standard deviation over seeds. Parent 1 gives the depth, parent 2 "
    "the widths. Best parent: the highest of each seed. Methods see no labels, but 200 probe images for parents of "
    "the same data, and 1,000 for the others. naive average: of networks of equal depth, with recomputed BatchNorm "
    "statistics. -: the method does not accept such networks."
)


def parts(study: Study) -> list[Part]:
    """Train all parents, fuse them by every method, and return tables and pictures.

    Overrides: `pairs=vgg,resnet` and `methods=PLeaS;RegMean` select some. `most=2000` limits the images. `part=validation`
    takes the images on which settings are chosen.
    """
    request = _requested(study.overrides)
    results = {pair: study.each_seed(lambda seed, pair=pair: {
        name: row for name in request.methods if (row := _result(study, request, pair, seed, name))["accuracy"] is not None
    }) for pair in request.pairs}  # fmt: skip
    accuracies = {pair: [_accuracies(seed) for seed in seeds] for pair, seeds in results.items()}
    seconds = {pair: [{name: row["seconds"] for name, row in seed.items() if name not in (*PARENTS, "ensemble")}
                      for seed in seeds] for pair, seeds in results.items()}  # fmt: skip
    note = NOTE.format(images=f"{f'the first {request.most}' if request.most else 'all'} {request.part} images")
    pictures = [
        Picture(_drawn(accuracies, pairs, study.folder / f"{kind}.png"), note) for kind, pairs in _kinds(request.pairs)
    ]
    return [*pictures, _table(study, "One-shot fusion", accuracies, mean_and_spread, note),
            _table(study, "Seconds", seconds, lambda values: f"{sum(values) / len(values):.1f}",
                   "Seconds to make the network, on one thread.")]  # fmt: skip


def _result(study: Study, request: Request, pair: str, seed: int, name: str) -> Mapping[str, Any]:
    file = f"{request.part}-{request.most or 'all'}/{pair}-{seed}-{name}"
    return study.once(file, METHODS[name].facts, lambda: measured(study.folder, request, pair, seed, name))


def measured(folder: Path, request: Request, pair: str, seed: int, name: str) -> dict[str, Any]:
    """Fuse a pair of networks by a method.

    Args:
        folder: The folder of the study.
        request: The images to measure on.
        pair: The name of the pair.
        seed: The seed.
        name: A key of METHODS.

    Returns:
        "accuracy" (a fraction), "seconds", and "refused": why the method cannot fuse them (then the others are None), or "".
    """
    networks, images = parents(folder, pair, seed), probe(pair, seed)
    begin = time.perf_counter()
    try:
        network, refused = METHODS[name].make(networks, images), "no such parent"
    except UserError as error:
        network, refused = None, str(error)
    seconds = time.perf_counter() - begin
    if network is None:
        return {"accuracy": None, "seconds": None, "refused": refused}
    return {"accuracy": accuracy_of(network, pair, seed, request.part, request.most), "seconds": seconds, "refused": ""}


def _accuracies(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    own = {name: row["accuracy"] for name, row in results.items() if name in PARENTS}
    return {**own, **({BEST: max(own.values())} if own else {}), **{name: row["accuracy"] for name, row in results.items()}}


def _table(study: Study, title: str, results: Results, shown: Callable[[list[float]], str], note: str) -> Table:
    rows = []
    for name in dict.fromkeys((*PARENTS, BEST, *METHODS)):
        values = [[seed[name] for seed in seeds if name in seed] for seeds in results.values()]
        if any(values):
            rows.append([name, *(shown(each) if each else "-" for each in values)])
    return study.table(title, ["method", *results], rows, note)


def _kinds(pairs: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the pairs for each picture: parents of the same data, and parents of different data."""
    same = [name for name in pairs if not fusion_pairs.PAIRS[name].split]
    return [(kind, names) for kind, names in (("same", same), ("different", [n for n in pairs if n not in same])) if names]


def _drawn(results: Results, pairs: Sequence[str], path: Path) -> Path:
    shown = {pair: [{name: [share] for name, share in seed.items() if name not in PARENTS} for seed in results[pair]]
             for pair in pairs}  # fmt: skip
    return dots(shown, ["one-shot"], path)


def _requested(overrides: Sequence[str]) -> Request:
    request = Request(tuple(fusion_pairs.PAIRS), tuple(METHODS))
    for word in overrides:
        key, _, text = word.partition("=")
        if key == "pairs":
            request = replace(request, pairs=_names(text.split(","), "pair", fusion_pairs.PAIRS))
        elif key == "methods":
            request = replace(request, methods=_names(text.split(";"), "method", METHODS))
        elif key == "part" and text in PARTS:
            request = replace(request, part=text)
        elif key == "most" and text.isdecimal():
            request = replace(request, most=int(text))
        elif key in ("part", "most"):
            takes = f"one of: {', '.join(PARTS)}" if key == "part" else "a number of images, or 0 for all"
            raise UserError(f"override '{word}': takes {takes}")
        else:
            raise UserError(f"override '{word}': takes pairs=..., methods=..., part=..., most=...")
    return request


def _names(names: Sequence[str], kind: str, known: Mapping[str, Any]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise unknown(kind, name, list(known))
    return tuple(names)


reproduce = Reproduction("One-shot fusion without labels", "runs/fusion", ("cpu",), {"": parts}, check=_requested)
