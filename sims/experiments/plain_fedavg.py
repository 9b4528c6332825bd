"""FedAvg (McMahan et al. 2017, Alg. 1) as a plain loop in torch, on the splits of a configuration: ours is held against it.

Nothing of the round loop, the engines, the ledger and the exact sums is used: torch.optim.SGD, a data loader's batches, a
weighted mean of state dictionaries.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from clients.data import domain_specs, site_images, test_images, to_float
from clients.initial import initial_state
from clients.networks import Network, architecture_of
from conf.schema import Config
from conf.sites import roster

State = dict[str, Tensor]


def plain_fedavg(config: Config, seed: int) -> tuple[State, float]:
    """The network after config.rounds rounds of all sites, and its accuracy on all test images. `seed`: of the batches.

    Takes epochs, batch size, rate (constant) and momentum of the configuration. The network starts as its seed draws it.
    """
    torch.manual_seed(seed)
    network, state = architecture_of(config).build(), initial_state(config)
    parts = [site_images(config, site) for site in roster(config)]
    data = [TensorDataset(to_float(part.x), part.y) for part in parts]
    total = sum(len(part) for part in data)
    for _ in range(config.rounds):
        mean = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for part in data:
            network.load_state_dict(state)
            _train(network, part, config)
            for name, tensor in network.state_dict().items():
                mean[name] += tensor * (len(part) / total)
        state = copy.deepcopy(mean)
    network.load_state_dict(state)
    return state, _accuracy(network, config)


def _train(network: Network, part: TensorDataset, config: Config) -> None:
    training = config.training
    optimiser = torch.optim.SGD(network.parameters(), lr=training.rate, momentum=training.momentum)
    for _ in range(training.epochs):
        for images, labels in DataLoader(part, batch_size=training.batch, shuffle=True):
            optimiser.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimiser.step()


@torch.no_grad()
def _accuracy(network: Network, config: Config) -> float:
    images = [test_images(config, spec) for spec in domain_specs(config).values()]
    right = sum(int((network(to_float(one.x)).argmax(1) == one.y).sum()) for one in images)
    return right / sum(len(one) for one in images)
