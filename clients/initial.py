"""The states that a run starts from, drawn from the seed: the same at the server and at every site."""

import torch

from clients.data import num_classes
from clients.networks import Network, build_network, initialise
from clients.randomness import torch_generator
from conf.schema import Config
from fusion.exact import State

SHARED = "shared"  # the word under which the shared initialisation is drawn; a site's own is drawn under its name


def initial_network(config: Config, who: str = SHARED) -> Network:
    """theta_0 (`who` = SHARED), or the initialisation that belongs to one site alone (`who` = its name)."""
    network = build_network(config, num_classes(config))
    initialise(network, torch_generator(config.seed, "initialisation", who))
    return network


def initial_state(config: Config, who: str = SHARED) -> State:
    """The state of initial_network."""
    with torch.no_grad():
        return {name: tensor.detach() for name, tensor in initial_network(config, who).state_dict().items()}
