"""Use a run's networks on any data: predictions, metrics, and the examples of a site."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data import Images, outputs, own_images, site_images, to_float
from fedloom.clients.data.forms import schema_of
from fedloom.clients.data.standardise import KEY, SITE, Standardisation, sums_of
from fedloom.clients.evaluation.accuracy import pieces
from fedloom.clients.evaluation.metrics import metrics_of
from fedloom.clients.networks import HeadView
from fedloom.clients.storage.states import read_state
from fedloom.clients.training.device import pick_device
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.metrics import CLASS, MULTILABEL, TOKENS
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.server.run_folder.layout import STANDARDISATION

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
    named = _site(config, site)
    return Standardisation.from_sums(sums_of(site_images(config, named), schema_of(config, named.spec)))


def predicted(
    config: Config, network: nn.Module, inputs: Tensor, site: str, scores: bool, by: Standardisation | None = None
) -> Tensor:
    """Return predictions or raw outputs; arguments and result as in sims.api.Result.predict."""
    raw = _raw(config, network, inputs, site, by)
    kind = metrics_of(config).kind
    if scores or kind not in (CLASS, MULTILABEL, TOKENS):
        return raw
    return raw > 0 if kind == MULTILABEL else raw.argmax(-1)


def evaluated(
    config: Config, network: nn.Module, data: Any, metrics: Any, site: str, by: Standardisation | None = None
) -> dict[str, float]:
    """Return metrics on data; arguments and result as in sims.api.Result.evaluate."""
    if metrics:
        entries = [metrics] if isinstance(metrics, str) else list(metrics)
        config = replace(config, evaluation=replace(config.evaluation, metrics=entries, where="server"))
    chosen = metrics_of(config)
    inputs, targets = (data.x, data.y) if hasattr(data, "x") else _pair(data)
    raw = _raw(config, network, inputs, site, by)
    if len(raw) != len(targets):
        raise UserError(f"data: has {len(raw)} inputs, but {len(targets)} targets; it takes as many of both")
    values = chosen.values(chosen.sums(raw, targets.cpu()))
    return {each.facts.name: values[each.facts.name] for each in chosen.chosen if each.facts.name in values}


def examples_of(config: Config, site: str, split: str) -> Images:
    """Return a site's examples; arguments and result as in sims.api.Result.examples."""
    if split not in SPLITS:
        raise UserError(f"split: got '{split}', takes {', '.join(SPLITS)}")
    named = _site(config, site)
    return site_images(config, named) if split == "train" else own_images(config, named, split)


def _pair(data: Any) -> tuple[Tensor, Tensor]:
    try:
        inputs, targets = data
    except (TypeError, ValueError):
        raise UserError("data: takes examples with x and y, or a pair (inputs, targets)") from None
    return torch.as_tensor(inputs), torch.as_tensor(targets)


def _raw(config: Config, network: nn.Module, inputs: Tensor, site: str, by: Standardisation | None) -> Tensor:
    """Return a network's outputs in evaluation mode, on the CPU. Inputs and predicted numbers are in the data's units."""
    if config.data.heads != "shared" and not site:
        raise UserError(f"site: data.heads is {config.data.heads}, so name the site whose head answers")
    head = outputs(config, _site(config, site).spec) if site else slice(None)
    device = pick_device("cpu" if config.engine.device == "cpu" else "auto")
    view = HeadView(network.to(device), head, config.evaluation.statistics, by).eval()
    known = torch.as_tensor(inputs)
    known = known.float() if known.dtype == torch.float64 else known
    batches = known.tensor_split(pieces(len(known), config.evaluation.batch))
    with torch.inference_mode():
        taken = (batch.to(device) for batch in batches)
        found = [view(to_float(batch) if batch.dtype == torch.uint8 else batch).float().cpu() for batch in taken]
    return torch.cat(found).clone()


def _site(config: Config, name: str) -> Site:
    named = next((site for site in config.roster if site.name == name), None)
    if named is None:
        raise unknown("site", name, [site.name for site in config.roster])
    return named
