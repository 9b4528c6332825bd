"""The commands `fedloom align` and `fedloom fuse`: networks from files, a probe set from a domain, tables and pictures."""

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from fedloom.clients.data.domains import find
from fedloom.clients.networks import NetworkName, load_network, parse_name, save_network
from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.matching import layer_costs, match_units
from fedloom.fusion.classes import in_classes, united
from fedloom.fusion.comparators.baselines import Ensemble
from fedloom.fusion.graph.channels import wire
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.results import Fused
from fedloom.fusion.search import best_weights
from fedloom.fusion.settings import FusionSettings
from fedloom.sims.cli.options import numbers
from fedloom.sims.experiments.pairs import Task, accuracy, probe_set
from fedloom.sims.progress.waiting import waiting
from fedloom.sims.report.plots import alignment_figure
from fedloom.sims.report.tables import Table, percent

PICTURES = (".png", ".pdf", ".svg")
LONGEST = 200  # bytes of a file's name: a temporary one is longer

SEARCH = "search"  # instead of weights


@dataclass(frozen=True)
class Files:
    """Networks in files: their names where the files do not say them, and the images that all of them are for.

    `classes`: of each network the names of its outputs, with commas between; none: all have the probe domain's.
    """

    paths: Sequence[Path]
    names: Sequence[str]
    domain: str
    samples: int
    size: int
    grey: bool
    root: str = ""
    classes: Sequence[str] = ()

    @property
    def named(self) -> list[list[str]] | None:
        """The outputs' names by network. Raises UserError unless there are some for each, or for none."""
        if self.classes and len(self.classes) != len(self.paths):
            raise UserError(f"--classes: {len(self.classes)} lists of names for {len(self.paths)} files; takes one for each")
        return [[name.strip() for name in text.split(",")] for text in self.classes] or None

    def load(self) -> tuple[list[nn.Module], list[NetworkName], Tensor]:
        """The networks, their names and the probe set. Raises UserError naming the file or option at fault."""
        channels, count, named = 1 if self.grey else 3, find(self.domain).classes, self.named
        if len(self.names) > len(self.paths):
            raise UserError(f"--network: {len(self.names)} names for {len(self.paths)} files")
        counts = [len(names) for names in named] if named else [count] * len(self.paths)
        given = [parse_name(name, channels, self.size, outputs) if name else None
                 for name, outputs in zip(self.names, counts, strict=False)]  # fmt: skip
        with waiting("reading the networks"):
            loaded = [load_network(path, given[k] if k < len(given) else None) for k, path in enumerate(self.paths)]
        networks, names = [network for network, _ in loaded], [name for _, name in loaded]
        for path, name in zip(self.paths, names, strict=True):
            if (name.channels, name.size) != (names[0].channels, names[0].size):
                raise UserError(f"{path}: is for {name.channels} x {name.size} x {name.size} images, {self.paths[0]} for "
                                f"{names[0].channels} x {names[0].size} x {names[0].size}")  # fmt: skip
        with waiting(f"reading images of {self.domain}"):
            return networks, names, probe_set(self.task(names[0]), self.samples)

    def task(self, name: NetworkName, domain: str = "") -> Task:
        """The images of a domain as a network takes them."""
        return Task(domain or self.domain, name.size, name.channels == 1, root=self.root)

    def answering(self, network: nn.Module, own: Sequence[str], domain: str, probe: Tensor) -> nn.Module:
        """A network, whose outputs have these names, with those of the domain. UserError for names that it does not have."""
        found = find(domain)
        wanted = found.names or tuple(str(label) for label in range(found.classes))
        for name in own:
            if name not in wanted:
                raise UserError(f"--classes: '{name}' is no class of {domain}, on which accuracies are measured; it has "
                                f"{', '.join(wanted[:12])}{', ...' * (len(wanted) > 12)}")  # fmt: skip
        return in_classes([network], [own], wanted, probe)[0]


def align(files: Files, comparison: str, pin_first: bool, pin_last: bool, out: Path) -> Table:
    """Compare the layers of two networks, draw the costs with the chosen map to `out`, and return the map as a table."""
    _check_out(out, PICTURES)
    (a, b), _, probe = files.load()
    with waiting("comparing layers"):
        one, two = wire(a, probe[:1]), wire(b, probe[:1])
        kind = {"neurons": {"representation": "neurons"}}.get(comparison, {"dissimilarity": comparison})
        cost = layer_costs(a, b, probe, **kind)
        pairs = match_units(one, two, cost, pin_first=pin_first, pin_last=pin_last)
    alignment_figure(
        cost, [u.name for u in one.units], [u.name for u in two.units], pairs, [u.group for u in one.units], out
    )
    rows = [[place, u.name, *_partner(place, pairs, two.units, cost), u.group] for place, u in enumerate(one.units)]
    head = ["#", str(files.paths[0].name), f"layer of {files.paths[1].name}", "cost", "group"]
    total = sum(cost[i, j] for i, j in pairs.items())
    return Table(
        "Alignment", head, rows, f"{comparison} over {len(probe)} samples of {files.domain}; cost of the map {total:.4f}"
    )


def _partner(place: int, pairs: dict[int, int], units: Sequence, cost: np.ndarray) -> list[str]:
    if place not in pairs:
        return ["-", "-"]
    return [units[pairs[place]].name, f"{cost[place, pairs[place]]:.4f}"]


@dataclass(frozen=True)
class Order:
    """What to fuse into what: a file's name or its place (1, 2, ...), and where the result goes."""

    into: str
    depth: str
    weights: str
    out: Path
    labels: str = ""


def fuse_files(files: Files, order: Order, settings: FusionSettings) -> list[Table]:
    """Fuse, save the network and return the report's tables."""
    into = _place(files.paths, order.into, "--into")
    depth = _place(files.paths, order.depth, "--depth") if order.depth else into
    weights = numbers(order.weights, "--weights") if order.weights != SEARCH else None
    _check_out(order.out, taken=files.paths)
    if order.labels:
        find(order.labels)
    elif order.weights == SEARCH:
        raise UserError(f"--weights {SEARCH}: needs --labels, the domain whose validation images choose them")
    networks, names, probe = files.load()
    if order.labels and not files.classes:
        _check_answers(files.paths, names, order.labels)
    names[into] = _widened(names[into], settings.width)
    run = partial(fuse, networks, into=into, depth=depth, probe=probe, classes=files.named, settings=settings)
    measured = _Measured(files, files.task(names[0], order.labels), probe, united(files.named or [], into))
    with waiting("aligning and fusing"):
        if order.weights == SEARCH:
            weights, _ = best_weights(lambda tried: run(weights=tried).network, measured.validation, len(networks))
        fused = run(weights=weights)
    named = replace(names[depth], classes=len(fused.classes) or names[depth].classes)
    save_network(order.out, fused.network, _name(fused.network, named, names[into]))
    tables = [_made(fused, settings, files), *([_costs(fused, files)] if any(fused.costs) else []), _seconds(fused)]
    if order.weights == SEARCH:
        tables.insert(0, Table("Weights", [path.name for path in files.paths], [[f"{share:.2f}" for share in weights or []]],
                               f"chosen on validation images of {order.labels}"))  # fmt: skip
    if order.labels:
        control = run(weights=[float(place == into) for place in range(len(networks))]).network
        tables.insert(0, measured.table(networks, fused.network, control, files.paths[into].name))
    return tables


@dataclass(frozen=True)
class _Measured:
    """Accuracies on the images of `task` of networks whose outputs have the names of `files`, of fused ones `united`."""

    files: Files
    task: Task
    probe: Tensor
    united: Sequence[str]

    def validation(self, network: nn.Module) -> float:
        """Of a fused network."""
        return accuracy(self._answering(network, self.united), self.task, "validation")

    def table(self, networks: Sequence[nn.Module], fused: nn.Module, control: nn.Module, name: str) -> Table:
        """`control`: made like the fused network, of the network `name` alone."""
        own = self.files.named or [()] * len(networks)
        answering = [self._answering(network, names) for network, names in zip(networks, own, strict=True)]
        rows = [(path.name, network) for path, network in zip(self.files.paths, answering, strict=True)]
        rows += [("all of them (ensemble)", Ensemble(answering)), ("fused", self._answering(fused, self.united)),
                 (f"control: {name} alone, fused like that", self._answering(control, self.united))]  # fmt: skip
        with waiting("measuring"):
            cells = [[name, percent(accuracy(network, self.task, "test"))] for name, network in rows]
        return Table(f"Accuracy on {self.task.domain}", ["network", "test images"], cells)

    def _answering(self, network: nn.Module, own: Sequence[str]) -> nn.Module:
        return self.files.answering(network, own, self.task.domain, self.probe) if own else network


def _name(network: nn.Module, depth: NetworkName, into: NetworkName) -> NetworkName:
    """What builds the fused network: the one's family with its own options or the other's (their widths), maybe a bias."""
    shapes = {key: tensor.shape for key, tensor in network.state_dict().items()}
    linear = [shape[0] for key, shape in shapes.items() if len(shape) == 2]
    widths = {**depth.options, **({"widths": linear[:-1]} if "widths" in depth.options else {})}
    choices = [{**options, **bias} for bias in ({}, {"bias": True}) for options in (depth.options, into.options, widths)]
    for name in (replace(depth, options=options) for options in choices):
        with suppress(UserError):
            if {key: tensor.shape for key, tensor in name.build().state_dict().items()} == shapes:
                return name
    raise UserError(f"the fused network has the layers of {depth.name} and the widths of {into.name}: no named network has "
                    "both, and its file could not be read back; leave --depth out")  # fmt: skip


def _check_answers(paths: Sequence[Path], names: Sequence[NetworkName], domain: str) -> None:
    for path, name in zip(paths, names, strict=True):
        if name.classes != find(domain).classes:
            raise UserError(f"{path}: answers for {name.classes} classes, --labels {domain} has {find(domain).classes}; "
                            "name each network's by --classes, or leave --labels out")  # fmt: skip


def _made(fused: Fused, settings: FusionSettings, files: Files) -> Table:
    rows = [
        ["refit", settings.refit],
        ["parameters", f"{fused.parameters:,}"],
        ["seconds", f"{sum(fused.seconds.values()):.1f}"],
        *([["classes", ", ".join(fused.classes)]] if fused.classes else []),
    ]
    notes = [re.sub(r"\bnetwork (\d+)", lambda found: files.paths[int(found[1])].name, note) for note in fused.notes]
    return Table("The fused network", ["", ""], rows, ". ".join(notes))


def _costs(fused: Fused, files: Files) -> Table:
    moving = [k for k, costs in enumerate(fused.costs) if costs]
    layers = fused.costs[moving[0]] if moving else {}
    rows = [[layer, *(f"{fused.costs[k].get(layer, math.nan):.4g}" for k in moving)] for layer in layers]
    return Table("Transport cost of each axis", ["written by", *(files.paths[k].name for k in moving)], rows)


def _seconds(fused: Fused) -> Table:
    rows = [[part, f"{seconds:.3f}"] for part, seconds in fused.seconds.items()]
    return Table("Seconds", ["part", "s"], [*rows, ["all", f"{sum(fused.seconds.values()):.3f}"]])


def _widened(name: NetworkName, width: float) -> NetworkName:
    """The name of a network of `width` times the channels. UserError if there is none: its file could not be read back."""
    if width == 1.0:
        return name
    own = {key: tensor.shape for key, tensor in name.build().state_dict().items()}
    options = {key: value for key, value in name.options.items() if key not in ("width", "widths")}
    factor = {"width": width * float(name.options.get("width", 1.0))}
    if "widths" in name.options:
        factor = {"widths": [round(width * size) for size in name.options["widths"]]}
    wider = replace(name, options=options | factor)
    with suppress(UserError):
        new = wider.build().state_dict()
        if all(size in (old, round(width * old)) for key in own for old, size in zip(own[key], new[key].shape, strict=True)):
            return wider
    raise UserError(f"--width {width:g}: no named network has {width:g} times the channels of {name.name} (scaled widths "
                    "are multiples of 8), and its file could not be read back; take another, or fuse in Python")  # fmt: skip


def check_report(out: Path) -> Path:
    """Where the report goes. Raises UserError if that is no place for it."""
    path = out.with_suffix(".md") if out.suffix else out.with_name(f"{out.name}.md")
    if path == out or path.is_dir():
        raise UserError(f"--report: would be written to {path}, which is taken; give --out another name")
    return path


def _check_out(out: Path, endings: Sequence[str] = (), taken: Sequence[Path] = ()) -> None:
    if not out.parent.is_dir():
        raise UserError(f"--out: the folder {out.parent} is not there")
    if out.is_dir() or not out.name or (out.exists() and not out.is_file()):
        raise UserError(f"--out: {out} is no place for a file; give the name of a new one")
    if any(out.resolve() == path.resolve() for path in taken):
        raise UserError(f"--out: {out} is one of the networks that are fused; give another name")
    if not os.access(out.parent, os.W_OK) or len(os.fsencode(out.name)) > LONGEST or Path("/proc") in out.resolve().parents:
        raise UserError(f"--out: {out} cannot be written; give another place, and a name of at most {LONGEST} bytes")
    if endings and out.suffix not in endings:
        raise UserError(f"--out: got '{out.name}', takes a name that ends in {', '.join(endings)}")


def _place(paths: Sequence[Path], text: str, option: str) -> int:
    for place, path in enumerate(paths):
        if text in (str(path), path.name, path.stem, str(place + 1)):
            return place
    raise UserError(
        f"{option}: '{text}' is none of the networks; takes {', '.join(path.name for path in paths)} or their number"
    )
