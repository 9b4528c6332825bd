"""The states that a run starts from, drawn from the seed: the same at the server and at every site."""

import torch

from clients.networks import architecture_of, initialise
from clients.randomness import torch_generator
from conf.schema import Config
from conf.sites import Site
from fusion.exact import State

SHARED = "shared"  # the word under which the shared initialisation is drawn; a site's own is drawn under its name


def initial_state(config: Config, who: str = SHARED, site: Site | None = None) -> State:
    """theta_0 (`who` = SHARED), or the initialisation that belongs to one site alone (`who` = its name).

    `site`: of that site's architecture, which may be its own (clients.networks.architecture_of).
    """
    network = architecture_of(config, site).build()
    initialise(network, torch_generator(config.seed, "initialisation", who))
    with torch.no_grad():
        return {name: tensor.detach() for name, tensor in network.state_dict().items()}
