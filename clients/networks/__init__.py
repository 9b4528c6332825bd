"""The networks that sites train, each an extractor and a head; and networks by name, torchvision's too."""

from clients.networks.architecture import Architecture, Model, architecture_of, common_architecture, network_text
from clients.networks.base import NETWORKS, Network, NetworkSpec, initialise, parameter_count
from clients.networks.convnet import Convnet
from clients.networks.exits import ExitNetwork
from clients.networks.head_view import HeadView
from clients.networks.named import NetworkName, load_network, parse_name, save_network
from clients.networks.own import OwnNetwork
from clients.networks.plain import Conv6, Vgg16
from clients.networks.residual import WideResnet
from clients.networks.small import Lenet, Mlp
from clients.networks.split import Split, pieces, split_points

__all__ = [
    "NETWORKS",
    "Architecture",
    "Conv6",
    "Convnet",
    "ExitNetwork",
    "HeadView",
    "Lenet",
    "Mlp",
    "Model",
    "Network",
    "NetworkName",
    "NetworkSpec",
    "OwnNetwork",
    "Split",
    "Vgg16",
    "WideResnet",
    "architecture_of",
    "common_architecture",
    "initialise",
    "load_network",
    "network_text",
    "parameter_count",
    "parse_name",
    "pieces",
    "save_network",
    "split_points",
]
