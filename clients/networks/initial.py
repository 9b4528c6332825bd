"""The states that a run starts from, drawn from the seed: the same at the server and at every site."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from fedloom.clients.networks import architecture_of, initialise
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import State

_ALIKE: ContextVar[bool] = ContextVar("alike", default=False)
SHARED = "shared"  # the word under which the shared initialisation is drawn; a site's own is drawn under its name


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """Within, no site has a start of its own: with a seed for it, a server could have one network live among dead ones."""
    token = _ALIKE.set(True)
    try:
        yield
    finally:
        _ALIKE.reset(token)


def initial_state(config: Config, who: str = SHARED, site: Site | None = None) -> State:
    """theta_0 (`who` = SHARED), or the initialisation that belongs to one site alone (`who` = its name).

    `site`: of that site's architecture, which may be its own (clients.networks.architecture_of).
    """
    if who != SHARED and _ALIKE.get():
        raise UserError("objective.initialisation: under masks all sites start alike, so that no start is one site's alone; "
                        "set initialisation=shared, or take another objective")  # fmt: skip
    network = architecture_of(config, site).build()
    initialise(network, torch_generator(config.seed, "initialisation", who))
    with torch.no_grad():
        return {name: tensor.detach() for name, tensor in network.state_dict().items()}
