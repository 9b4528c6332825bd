"""Use a run's networks on any data: predictions, metrics, and the examples of a site."""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.clients.data import Examples, domain_specs, outputs, own_examples, site_examples, to_float
from fedloom.clients.data.form import ARRAY, FEATURES, IMAGE, SEQUENCE
from fedloom.clients.data.forms import schema_of
from fedloom.clients.data.found import Encoding
from fedloom.clients.data.own import digests, encoding_of
from fedloom.clients.data.schema import IGNORED
from fedloom.clients.data.standardise import KEY, SITE, Standardisation, first_schema, sums_of
from fedloom.clients.data.tables import rows_of
from fedloom.clients.evaluation.accuracy import pieces
from fedloom.clients.evaluation.metrics import metrics_of
from fedloom.clients.networks import HeadView, form_of
from fedloom.clients.storage.states import read_state
from fedloom.clients.training.torch_setup import pick_device
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.formatting import count
from fedloom.conf.metrics import CLASS, MULTILABEL, TOKENS
from fedloom.conf.plain_values import plain_value
from fedloom.conf.plugins import error_summary
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.conf.values import shortened
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.run_folder.layout import STANDARDISATION

MOST_VALUE = 2.0  # of a float image in [-1, 1], with some noise
CLASSES = ": the number of each example's class, in the order of class_names()"
SPLITS = ("train", "validation", "test")


def standardisation_of(config: Config, folder: Path, site: str) -> Standardisation | None:
    """Return the mean and deviation by which a run's networks take the inputs of a site; None: they take them as they are.

    Raises:
        UserError: Only sites know them, and `site` is empty or its data are not on this machine.
    """
    if (path := folder / STANDARDISATION).exists():
        return Standardisation.parsed(read_state(path))
    if config.data.standardise != SITE:
        return None
    if not site:
        raise UserError(f"site: {KEY} is {SITE}, so name the site whose mean and deviation apply")
    named = site_of(config, site)
    _check_unchanged(folder, named.spec.domain)
    return Standardisation.from_sums(sums_of(site_examples(config, named), schema_of(config, named.spec)))


def predicted(
    config: Config, network: nn.Module, inputs: Tensor, site: str, scores: bool, probabilities: bool, folder: Path
) -> Tensor:
    """Return predictions, raw outputs or probabilities; arguments and result as in sims.result.Result.predict."""
    raw = _raw(config, network, inputs, site, folder)
    kind = metrics_of(config).kind
    if probabilities:
        if kind not in (CLASS, MULTILABEL, TOKENS):
            raise UserError("probabilities: the run predicts numbers; leave probabilities out")
        return raw.sigmoid() if kind == MULTILABEL else raw.softmax(-1)
    if scores or kind not in (CLASS, MULTILABEL, TOKENS):
        return raw
    return raw > 0 if kind == MULTILABEL else raw.argmax(-1)


def evaluated(config: Config, network: nn.Module, data: Any, metrics: Any, site: str, folder: Path) -> dict[str, float]:
    """Return metrics on data; arguments and result as in sims.result.Result.evaluate."""
    if isinstance(metrics, Tensor | np.ndarray):
        raise UserError("metrics: got a tensor or an array; pass inputs and targets as a pair: evaluate((inputs, targets))")
    if metrics:
        entries = plain_value(list(metrics) if isinstance(metrics, list | tuple) else [metrics], "metrics", here=True)
        config = replace(config, evaluation=replace(config.evaluation, metrics=entries, where="server"))
    chosen = metrics_of(config)
    inputs, targets = (data.x, data.y) if hasattr(data, "x") and hasattr(data, "y") else _pair(data)
    raw = _raw(config, network, inputs, site, folder)
    values = chosen.values(chosen.sums(raw, targets_for(raw, targets, chosen.kind)))
    return {each.facts.name: values[each.facts.name] for each in chosen.chosen if each.facts.name in values}


def examples_of(config: Config, site: str, split: str) -> Examples:
    """Return a site's examples; arguments and result as in sims.result.Result.examples."""
    if split not in SPLITS:
        raise UserError(f"split: got '{split}', takes {', '.join(SPLITS)}")
    named = site_of(config, site)
    return site_examples(config, named) if split == "train" else own_examples(config, named, split)


def _pair(data: Any) -> tuple[Any, Any]:
    try:
        inputs, targets = data
    except (TypeError, ValueError):
        raise UserError("data: takes examples with x and y, or a pair (inputs, targets)") from None
    return inputs, targets


def targets_for(raw: Tensor, targets: Any, kind: str) -> Tensor:
    """Return a user's targets of this kind for raw outputs, as metrics take them. Raises UserError for other ones."""
    try:
        found = torch.as_tensor(targets).cpu()
    except (TypeError, ValueError, RuntimeError):
        of = f" of {targets.dtype}" if hasattr(targets, "dtype") else ""
        raise UserError(f"data: got targets of the type {type(targets).__name__}{of}, takes a tensor or an array of numbers"
                        f"{CLASSES if kind == CLASS else ''}") from None  # fmt: skip
    if len(raw) != (number := len(found) if found.ndim else 1):
        raise UserError(f"data: has {len(raw)} inputs, but {number} targets; it takes as many of both")
    shape = raw.shape[:-1] if kind in (CLASS, TOKENS) else raw.shape
    if found.shape != shape and found.squeeze(-1).shape != shape and found.unsqueeze(-1).shape != shape:
        raise UserError(f"data: got targets of the shape {list(found.shape)}, takes {list(shape)}"
                        f"{CLASSES if kind == CLASS else ''}")  # fmt: skip
    found = found.reshape(shape)
    if found.is_complex():
        raise UserError("data: got complex numbers as targets, takes real ones")
    if odd := int((~found.isfinite()).sum()):
        raise UserError(f"data: got {odd} targets that are missing or infinite; correct them, or leave these examples out")
    return _numbered(found, raw.shape[-1], kind) if kind in (CLASS, TOKENS) else found.float()


def _numbered(found: Tensor, outputs: int, kind: str) -> Tensor:
    """Return class numbers or tokens as int64. Raises UserError for fractions, and for numbers without an output."""
    numbers = found.long()
    wrong = (numbers < 0) | (numbers >= outputs) | (numbers != found)
    if kind == TOKENS:
        wrong &= numbers != IGNORED
    if wrong.any():
        what = "a token" if kind == TOKENS else "a class"
        raise UserError(f"data: got the target {found[wrong][0].item():g}, but {what} is a whole number from 0 to "
                        f"{outputs - 1}{'' if kind == TOKENS else ', in the order of class_names()'}")  # fmt: skip
    return numbers


def measured(config: Config, network: Any, measure: Callable[[Any], dict[str, float]]) -> dict[str, float]:
    """Return what `measure` returns for a copy of a user's network. Raises UserError if the network does not fit the run."""
    form = form_of(config)
    if not isinstance(network, nn.Module):
        raise UserError(f"network: got {shortened(network)}, takes a torch module (an instance of torch.nn.Module)")
    steps = (form.length,) if form.each_step else ()
    takes = f"it takes {form}, and returns [{', '.join(map(str, ('n', *steps, form.outputs)))}]"

    def check(_: nn.Module, given: tuple[Any, ...], made: object) -> None:
        got = f"the shape {list(made.shape)}" if isinstance(made, Tensor) else f"the type {type(made).__name__}"
        if not isinstance(made, Tensor) or made.shape != (len(given[0]), *steps, form.outputs):
            raise UserError(f"network: got outputs of {got} for inputs {list(given[0].shape)}; {takes}")

    try:
        copied = copy.deepcopy(network).eval()
        copied.register_forward_hook(check)
        return measure(copied)
    except UserError:
        raise
    except Exception as error:  # a user's network can raise anything
        raise UserError(f"network: fails on the run's test examples ({error_summary(error)}); {takes}") from error


def _raw(config: Config, network: nn.Module, inputs: Tensor, site: str, folder: Path) -> Tensor:
    """Return a network's outputs in evaluation mode, on the CPU. Inputs and predicted numbers are in the data's units."""
    if config.data.heads != "shared" and not site:
        raise UserError(f"site: data.heads is {config.data.heads}, so name the site whose head answers")
    by = standardisation_of(config, folder, site)
    head = outputs(config, site_of(config, site).spec) if site else slice(None)
    device = pick_device("cpu" if config.engine.device == "cpu" else "auto")
    view = HeadView(network.to(device), head, config.evaluation.statistics, by).eval()
    values = _checked(config, inputs, site, folder)
    if form_of(config).kind == IMAGE and by is None:
        _warn_of_range(values)
    batches = values.tensor_split(pieces(len(values), config.evaluation.batch))
    with torch.inference_mode():
        taken = (batch.to(device) for batch in batches)
        try:
            found = [view(to_float(batch) if batch.dtype == torch.uint8 else batch).float().cpu() for batch in taken]
        except (RuntimeError, IndexError, ValueError) as error:
            fault = f"inputs: the network fails on {list(values.shape)} ({error_summary(error)})"
            raise UserError(f"{fault}; it takes {form_of(config)}") from error
    return torch.cat(found).clone()


def _checked(config: Config, inputs: Any, site: str, folder: Path) -> Tensor:
    """Return inputs as a tensor; measurements are float32. Raises UserError for other things, and for other features."""
    if isinstance(inputs, str | Path | Mapping) or hasattr(inputs, "columns"):
        spec = site_of(config, site).spec if site else next(iter(domain_specs(config).values()))
        if not spec.domain.startswith("table:"):
            raise UserError(f"inputs: got a {type(inputs).__name__}, but the run has no table; "
                            "takes a tensor or an array of numbers, such as table[COLUMNS].to_numpy()")  # fmt: skip
        inputs = rows_of(_encoding(folder, spec.domain), inputs)
    try:
        values = torch.as_tensor(inputs)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"inputs: got a {type(inputs).__name__}, takes a tensor or an array of numbers") from None
    if values.ndim > 1 and (odd := int((~values.isfinite()).flatten(1).any(1).sum())):
        raise UserError(f"inputs: {count(odd, 'example')} with missing or infinite values; fill them in, or leave them out")
    form = form_of(config)
    if form.kind in (FEATURES, ARRAY) and values.shape[1:] != form.shape:
        columns = ", ".join(first_schema(config).columns)
        takes = ", ".join(map(str, ("n", *form.shape))) + (f"]: {columns}" if columns else "]")
        raise UserError(f"inputs: got the shape {list(values.shape)}, takes [{takes}")
    if form.kind == IMAGE and (values.ndim != 4 or values.shape[1] != form.channels):
        last = values.ndim == 4 and values.shape[-1] == form.channels
        way = "; channels come first, as after x.permute(0, 3, 1, 2)" if last else ""
        raise UserError(f"inputs: got the shape {list(values.shape)}, takes images [n, {form.channels}, height, width]{way}")
    return values.float() if values.is_floating_point() or form.kind in (FEATURES, SEQUENCE, ARRAY) else values


def _warn_of_range(images: Tensor) -> None:
    """Warn, at the user's line, of float images whose values are unlikely to be in [-1, 1], which networks take."""
    if not images.is_floating_point() or not images.numel():
        return
    low, high = (float(value) for value in images.aminmax())
    if high > MOST_VALUE or 0 <= low < high <= 1:
        way = "x * 2 - 1" if high <= 1 else "x / 127.5 - 1"
        warnings.warn(f"inputs: float images have values from {low:.3g} to {high:.3g}, but the networks take -1 to 1, so "
                      f"predictions may be wrong; pass uint8 images, or {way}", UserWarning, stacklevel=5)  # fmt: skip


def _encoding(folder: Path, domain: str) -> Encoding:
    """Return how the run's inputs were made of a table, as saved or, for older runs, from the unchanged table."""
    if (saved := RunFolder(folder).table(domain)) is None:
        _check_unchanged(folder, domain)
        saved = encoding_of(domain)
    assert saved is not None  # a table has one
    return saved


def _check_unchanged(folder: Path, domain: str) -> None:
    """Raise UserError if a domain's files are not those of the run."""
    for path in RunFolder(folder).changed(digests([domain])):
        raise UserError(f"{path} has changed since the run, so how its inputs were made is unknown; restore the file")


def site_of(config: Config, name: str) -> Site:
    """Return the site of this name. Raises UserError for an unknown one."""
    named = next((site for site in config.roster if site.name == name), None)
    if named is None:
        raise unknown("site", name, [site.name for site in config.roster])
    return named
