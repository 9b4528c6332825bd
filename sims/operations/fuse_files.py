"""Fuse networks from files into one network, and save it to a file."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from fedloom.clients.data.domains import find
from fedloom.clients.networks import NetworkName, save_network
from fedloom.conf.errors import UserError
from fedloom.conf.progress import under_way
from fedloom.fusion.baselines import Ensemble
from fedloom.fusion.classes import united
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.results import Fused
from fedloom.fusion.search import best_weights
from fedloom.fusion.settings import FusionSettings
from fedloom.sims.operations.domain_task import Task, accuracy, images
from fedloom.sims.operations.network_files import NetworkFiles, check_out, image_domain, number, prefixed
from fedloom.sims.report.tables import Table, percent


@dataclass(frozen=True)
class FusionOrder:
    """The network to make from networks in files.

    Attributes:
        into: The file (its path, name, or number from 1) that sets the widths.
        depth: The file that sets the layers; "": the same as `into`.
        out: The file to write.
        weights: The networks' weights in the average; None: equal, or with `search` the best ones.
        search: Whether to search for the best weights on validation examples.
        labels: The domain on whose images to measure accuracy; "": none.
    """

    into: str
    depth: str
    out: Path
    weights: Sequence[float] | None = None
    search: bool = False
    labels: str = ""


def fuse_files(files: NetworkFiles, order: FusionOrder, settings: FusionSettings) -> list[Table]:
    """Fuse the networks in files, save the result to `order.out`, and return the report's tables."""
    if len(files.paths) < 2:
        raise UserError(f"fuse: {files.paths[0]} is the only file; use two or more")
    if not order.into:
        raise UserError(f"--into: is missing; name the file with the widths of the result: --into {files.shown[0]}")
    into = number(files.paths, order.into, "--into")
    depth = number(files.paths, order.depth, "--depth") if order.depth else into
    check_out(order.out, taken=files.paths)
    if order.labels:
        image_domain(order.labels, "--labels", labelled=True)
    elif order.search:
        raise UserError("--weights search: needs --labels, the domain whose validation examples choose them")
    networks, names, probe = files.load()
    if order.labels and not files.classes:
        _check_answers(files.paths, names, order.labels)
    names[into] = _widened(names[into], settings.width)
    fused_by = partial(fuse, networks, into=into, depth=depth, probe=probe, classes=files.named, settings=settings)
    task = files.task(names[0], order.labels)
    if order.labels:
        with prefixed("--labels"):  # before the work
            images(task, "test")
    note = files.splits.checked(task, order.search) if order.labels else ""
    measured = _Measured(files, task, probe, united(files.named or [], into), note)
    with files.named_in_errors():
        weights, fused = _fused(fused_by, measured, order, len(networks))
    form = names[depth].form
    named = replace(names[depth], form=replace(form, outputs=len(fused.classes) or form.outputs))
    save_network(order.out, fused.network, _name(fused.network, named, names[into]), files.splits.common)
    tables = [
        _made(fused, settings, files, into, probe),
        *([_costs(fused, files)] if any(fused.costs) else []),
        _seconds(fused),
    ]
    if order.search:
        tables.insert(0, Table("Weights", files.shown, [[f"{share:.2f}" for share in weights or []]],
                               f"chosen on validation examples of {order.labels}"))  # fmt: skip
    if order.labels:
        control = fused_by(weights=[float(index == into) for index in range(len(networks))]).network
        tables.insert(0, measured.table(networks, fused.network, control, files.shown[into]))
    return tables


def _fused(
    fused_by: Callable[..., Fused], measured: "_Measured", order: FusionOrder, networks: int
) -> tuple[Sequence[float] | None, Fused]:
    """Return the weights, after a search if the order asks for one, and the fused network."""
    weights = order.weights
    with under_way("aligning and fusing"):
        if order.search:
            weights, _ = best_weights(lambda tried: fused_by(weights=tried).network, measured.validation, networks)
        return weights, fused_by(weights=weights)


@dataclass(frozen=True)
class _Measured:
    """Accuracies on the images of `task`. Outputs have the names in `files`; those of fused networks are `united`.

    `note`: what the user should know about these images.
    """

    files: NetworkFiles
    task: Task
    probe: Tensor
    united: Sequence[str]
    note: str = ""

    def validation(self, network: nn.Module) -> float:
        """Return the accuracy of a fused network on the validation examples."""
        return accuracy(self._answering(network, self.united), self.task, "validation")

    def table(self, networks: Sequence[nn.Module], fused: nn.Module, control: nn.Module, name: str) -> Table:
        """Return the table of accuracies. `control`: fused in the same way from the network `name` alone."""
        own = self.files.named or [()] * len(networks)
        answering = [self._answering(network, names) for network, names in zip(networks, own, strict=True)]
        rows = list(zip(self.files.shown, answering, strict=True))
        rows += [("all of them (ensemble)", Ensemble(answering)), ("fused", self._answering(fused, self.united)),
                 (f"control: {name} alone, fused the same way", self._answering(control, self.united))]  # fmt: skip
        with under_way("measuring"):
            cells = [[name, percent(accuracy(network, self.task, "test"))] for name, network in rows]
        return Table(f"Accuracy on {self.task.domain}", ["network", "test examples"], cells, self.note)

    def _answering(self, network: nn.Module, own: Sequence[str]) -> nn.Module:
        return self.files.answering(network, own, self.task.domain, self.probe) if own else network


def _name(network: nn.Module, depth: NetworkName, into: NetworkName) -> NetworkName:
    """Return the name that builds the fused network: the family of `depth`, with options of `depth` or `into`, or a bias."""
    shapes = {key: tensor.shape for key, tensor in network.state_dict().items()}
    layers = [shape[0] for shape in shapes.values() if len(shape) > 1]  # outputs of linear layers and convolutions
    widths = {**depth.options, **({"widths": layers[:-1]} if "widths" in depth.options else {})}
    choices = [{**options, **bias} for bias in ({}, {"bias": True}) for options in (depth.options, into.options, widths)]
    for name in (replace(depth, options=options) for options in choices):
        with suppress(UserError):
            if {key: tensor.shape for key, tensor in name.build().state_dict().items()} == shapes:
                return name
    what = f"the fused network has the layers of {depth.name} and the widths of {into.name}"
    raise UserError(f"{what}. No named network has both, so its file could not be loaded; "
                    "use one file for --into and --depth, or fedloom.fuse in Python")  # fmt: skip


def _check_answers(paths: Sequence[Path], names: Sequence[NetworkName], domain: str) -> None:
    for path, name in zip(paths, names, strict=True):
        if (outputs := name.form.outputs) != find(domain).classes:
            raise UserError(f"{path}: has {outputs} outputs, but --labels {domain} has {find(domain).classes} classes; "
                            "name the outputs of each network with --classes, or leave --labels out")  # fmt: skip


def _made(fused: Fused, settings: FusionSettings, files: NetworkFiles, into: int, probe: Tensor) -> Table:
    alone = settings.distil_from == "into"
    rows = [
        ["distilled from", files.shown[into]] if alone else ["refit", settings.refit],
        ["parameters", f"{fused.parameters:,}"],
        ["seconds", f"{sum(fused.seconds.values()):.1f}"],
        *([["classes", ", ".join(fused.classes)]] if fused.classes else []),
    ]
    return Table(
        "The fused network", ["", ""], rows, ". ".join(filter(None, [files.few(probe), *map(files.by_name, fused.notes)]))
    )


def _costs(fused: Fused, files: NetworkFiles) -> Table:
    moving = [k for k, costs in enumerate(fused.costs) if costs]
    layers = fused.costs[moving[0]] if moving else {}
    rows = [[layer, *(f"{fused.costs[k].get(layer, math.nan):.4g}" for k in moving)] for layer in layers]
    return Table("Transport cost of each axis", ["written by", *(files.shown[k] for k in moving)], rows)


def _seconds(fused: Fused) -> Table:
    rows = [[part, f"{seconds:.3f}"] for part, seconds in fused.seconds.items()]
    return Table("Seconds", ["part", "s"], [*rows, ["all", f"{sum(fused.seconds.values()):.3f}"]])


def _widened(name: NetworkName, width: float) -> NetworkName:
    """Return the name of a network of `width` times the channels. Raises UserError if no named network has them."""
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
                    "are multiples of 8), so its file could not be loaded; use another, or fuse in Python")  # fmt: skip
