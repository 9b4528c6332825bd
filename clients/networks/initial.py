"""The initial states of a run, drawn from the seed. They are the same at the server and at every site."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from fedloom.clients.networks import architecture_of, initialise, start_of
from fedloom.clients.networks.base import frozen_in
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.exact import dequantise, quantise
from fedloom.fusion.state import State

_ALIKE: ContextVar[bool] = ContextVar("alike", default=False)
SHARED = "shared"  # seeds the shared initialisation; a site's name seeds its own


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """Within this context, allow only the initial weights that all sites share: `initial_state` raises UserError for others.

    With own weights, a server could choose a seed with which only one site's network trains, and read its contribution.
    """
    token = _ALIKE.set(True)
    try:
        yield
    finally:
        _ALIKE.reset(token)


def initial_state(config: Config, who: str = SHARED, site: Site | None = None, exact: bool = False) -> State:
    """Return the initial state that all sites share, theta_0 (`who` = SHARED), or one site's own (`who` = its name).

    Frozen tensors are multiples of the unit of the exact sums, so that sums and means do not move them.

    Args:
        config: The configuration.
        who: SHARED, or the name of a site.
        site: The site whose network it is for; None: the configuration's.
        exact: Leave frozen tensors as they are, for methods that never sum them.

    Raises:
        UserError: For one's own state inside `alike`.
    """
    if who != SHARED and _ALIKE.get():
        raise UserError("objective.initialisation: under masks all sites must start from the same weights; "
                        "set initialisation=shared, or choose another objective")  # fmt: skip
    network = architecture_of(config, site).build()
    initialise(network, torch_generator(config.seed, "initialisation", who))
    with torch.no_grad():
        state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    if path := start_of(config, site):
        from fedloom.clients.networks.start import started  # imported only where it is used

        state = started(state, path, network)
    still = frozen_in(network)
    if not still or exact:
        return state
    bits = config.federation.scale_bits
    held = {name: tensor for name, tensor in state.items() if name in still and tensor.dtype.is_floating_point}
    return {**state, **dequantise(quantise(held, bits), bits)}
