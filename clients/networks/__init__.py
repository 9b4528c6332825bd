"""The networks that sites train, each an extractor and a head; and networks by name, torchvision's too."""

from clients.networks.base import NETWORKS, Network, NetworkSpec, build_network, initialise, parameter_count
from clients.networks.named import NetworkName, load_network, parse_name, save_network
from clients.networks.plain import Conv6, Vgg16
from clients.networks.reading import Reading
from clients.networks.residual import WideResnet
from clients.networks.small import Lenet, Mlp

__all__ = [
    "NETWORKS",
    "Conv6",
    "Lenet",
    "Mlp",
    "Network",
    "NetworkName",
    "NetworkSpec",
    "Reading",
    "Vgg16",
    "WideResnet",
    "build_network",
    "initialise",
    "load_network",
    "parameter_count",
    "parse_name",
    "save_network",
]
