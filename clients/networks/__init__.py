"""The networks that sites train, each an extractor and a head; and networks by name, torchvision's too."""

from fedloom.clients.networks.architecture import Architecture, Model, architecture_of, common_architecture, network_text
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec, initialise, parameter_count
from fedloom.clients.networks.convnet import Convnet
from fedloom.clients.networks.exits import ExitNetwork
from fedloom.clients.networks.head_view import HeadView
from fedloom.clients.networks.named import NetworkName, load_network, parse_name, save_network
from fedloom.clients.networks.own import OwnNetwork
from fedloom.clients.networks.plain import Conv6, Vgg16
from fedloom.clients.networks.residual import WideResnet
from fedloom.clients.networks.small import Lenet, Mlp
from fedloom.clients.networks.split import Split, pieces, split_points

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
