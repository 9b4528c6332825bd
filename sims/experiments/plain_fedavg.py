"""FedAvg (McMahan et al. 2017, Alg. 1) as a plain loop in torch, to compare with.

It uses torch.optim.SGD, the batches of a data loader, and a weighted mean of state dictionaries. It uses no round loop,
engine, ledger or exact sum of this project.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedloom.clients.data import domain_specs, site_examples, test_images, to_float
from fedloom.clients.networks import Network, architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.training.min_batch_size import min_batch_size
from fedloom.clients.training.optimizers import optimizer_section
from fedloom.clients.training.schedules import schedule_section
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config

State = dict[str, Tensor]
LEFT_OUT = {
    "training": ["steps", "weight_decay", "clip", "label_smoothing", "augment", "precision"],
    "federation": ["fraction", "clip_change", "packed"],
    "privacy": ["noise"],
    "data": ["heads"],
    "evaluation": ["statistics"],
}  # options by section that must have their defaults
TAKEN = {
    "training.schedule": {"name": "constant"},
    "training.optimizer": {"name": "sgd"},
    "strategy": {"name": "fedavg", "weighting": "samples"},
    "objective": {"name": "fedavg", "mode": "", "batchnorm": "averaged"},
}  # the only supported values of these


def plain_fedavg(config: Config, seed: int) -> tuple[State, float]:
    """Return the network after config.rounds rounds of all sites, and its accuracy on all test examples.

    `seed` draws the batches. The configuration gives the start, the epochs, the batch size, the constant rate and the
    momentum. Integer tensors keep their start values. Raises UserError as `check_plain`.
    """
    check_plain(config)
    torch.manual_seed(seed)
    network, state = architecture_of(config).build(), initial_state(config)
    parts = [site_examples(config, site) for site in config.roster]
    data = [TensorDataset(to_float(part.x), part.y) for part in parts]
    total = sum(len(part) for part in data)
    for _ in range(config.rounds):
        mean = {name: torch.zeros_like(start) if start.is_floating_point() else start for name, start in state.items()}
        for part in data:
            network.load_state_dict(state)
            _train(network, part, config)
            for name, tensor in network.state_dict().items():
                if tensor.is_floating_point():
                    mean[name] += tensor * (len(part) / total)
        state = mean
    network.load_state_dict(state)
    return state, _accuracy(network.eval(), config)


def check_plain(config: Config) -> None:
    """Raise UserError for options that the loop does not support."""
    for section, keys in LEFT_OUT.items():
        here = getattr(config, section)
        for key in keys:
            if (value := getattr(here, key)) != getattr(type(here)(), key):
                raise _refused(f"{section}.{key}", value)
    sections = {"training.schedule": schedule_section(config.training), "strategy": config.strategy,
             "training.optimizer": optimizer_section(config.training), "objective": config.objective}  # fmt: skip
    for key, section in sections.items():
        if any(TAKEN[key].get(option) != value for option, value in section.items()):
            raise _refused(key, dict(section))
    for site in config.roster:
        if site.spec.flip or architecture_of(config, site) != architecture_of(config):
            raise _refused("sites", f"flip, or another network, for {site.name}")


def _refused(key: str, value: object) -> UserError:
    return UserError(f"{key}: got {value}, which the plain loop of FedAvg does not support; leave it out, or select methods "
                     "without the loop: tables=fedavg,scaffold")  # fmt: skip


def _train(network: Network, part: TensorDataset, config: Config) -> None:
    training = config.training
    optimiser = torch.optim.SGD(network.parameters(), lr=training.rate, momentum=training.momentum)
    lone = 0 < len(part) % training.batch < min_batch_size(architecture_of(config))  # a last batch too small for the network
    for _ in range(round(training.epochs)):
        for images, labels in DataLoader(part, batch_size=training.batch, shuffle=True, drop_last=lone):
            optimiser.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimiser.step()


@torch.no_grad()
def _accuracy(network: Network, config: Config) -> float:
    images = [test_images(config, spec) for spec in domain_specs(config).values()]
    right = sum(int((network(to_float(part.x)).argmax(1) == part.y).sum()) for part in images)
    return right / sum(len(part) for part in images)
