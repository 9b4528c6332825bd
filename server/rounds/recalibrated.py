"""The stored result of a recalibration. It lasts until the next round, or until a site is forgotten or readmitted."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fedloom.clients.networks import Architecture, Model
from fedloom.conf.sites import Site
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.view import Models, View

KEPT = "recalibrated."  # prefix of the network's name, for its stored parts


def holders(view: View, sites: Sequence[Site], architecture: Architecture) -> list[Site]:
    """Return the sites whose network has this architecture."""
    return [site for site in sites if view.architecture(site) == architecture]


def aggregates(view: View, models: Models) -> list[str]:
    """Return the names of the networks that belong to no site."""
    sites = {site.name for site in view.setup.sites}
    return [name for name in models if name not in sites]


def recalibrated(view: View, models: Models) -> Models:
    """Return the models with the tensors of the last recalibration; unchanged unless the view includes all sites."""
    stored = {name[len(KEPT) :]: parts for name, parts in view.slots.keeps().items() if name.startswith(KEPT) and parts}
    if not stored or not view.whole:
        return models
    return Models({name: (lambda name=name: _with(models[name], stored.get(name, {}))) for name in models})


def end(context: RoundContext) -> None:
    """Discard the stored result of the last recalibration, because the networks change."""
    for name, parts in context.slots.keeps().items():
        if name.startswith(KEPT) and parts:
            context.save_server_state(name, {})


def _with(model: Model, parts: Mapping[str, torch.Tensor]) -> Model:
    return replace(model, state={**model.state, **parts}) if parts else model
