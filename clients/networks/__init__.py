"""The networks that sites train, each an extractor and a head, and networks by name, including torchvision's."""

from fedloom.clients.networks.architecture import Architecture, Model, architecture_of, form_of, network_text, start_of
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec, Reused, initialise, parameter_count
from fedloom.clients.networks.head_view import HeadView
from fedloom.clients.networks.named import NetworkName, load_network, parse_name, save_network

__all__ = [
    "NETWORKS",
    "Architecture",
    "HeadView",
    "Model",
    "Network",
    "NetworkName",
    "NetworkSpec",
    "Reused",
    "architecture_of",
    "form_of",
    "initialise",
    "load_network",
    "network_text",
    "parameter_count",
    "parse_name",
    "save_network",
    "start_of",
]
