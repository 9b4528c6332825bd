"""The networks that sites train. Every one is an extractor and a head."""

from clients.networks.base import NETWORKS, Network, NetworkSpec, build_network, initialise, parameter_count
from clients.networks.plain import Conv6, Vgg16

__all__ = ["NETWORKS", "Conv6", "Network", "NetworkSpec", "Vgg16", "build_network", "initialise", "parameter_count"]
