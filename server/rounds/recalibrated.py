"""What is kept of a recalibration. It lasts until the next round, or until a site goes or comes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fedloom.clients.networks import Architecture, Model
from fedloom.conf.sites import Site
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.view import Models, View

KEPT = "recalibrated."  # before the network's name: what is kept of it


def holders(view: View, sites: Sequence[Site], architecture: Architecture) -> list[Site]:
    """Those of the sites whose network has this architecture."""
    return [site for site in sites if view.architecture(site) == architecture]


def aggregates(view: View, models: Models) -> list[str]:
    """The names of the networks that belong to no site."""
    sites = {site.name for site in view.setup.sites}
    return [name for name in models if name not in sites]


def recalibrated(view: View, models: Models) -> Models:
    """The models, with what is kept of their recalibration, if the view is of all sites."""
    kept = {name[len(KEPT) :]: parts for name, parts in view.slots.keeps().items() if name.startswith(KEPT) and parts}
    if not kept or not view.whole:
        return models
    return Models({name: (lambda name=name: _with(models[name], kept.get(name, {}))) for name in models})


def end(context: RoundContext) -> None:
    """What was recalibrated is so no more."""
    for name, parts in context.slots.keeps().items():
        if name.startswith(KEPT) and parts:
            context.save_server_state(name, {})


def _with(model: Model, parts: Mapping[str, torch.Tensor]) -> Model:
    return replace(model, state={**model.state, **parts}) if parts else model
