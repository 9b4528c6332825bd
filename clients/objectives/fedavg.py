"""FedAvg at a site (McMahan et al. 2017, Alg. 1, ClientUpdate): cross-entropy, starting from the server's network."""

from fedloom.clients.objectives.averaging import Averaged
from fedloom.clients.objectives.base import OBJECTIVES


@OBJECTIVES.register("fedavg")
class FedAvg(Averaged):
    """Minimises F_k(w), the cross-entropy of the network w on the site's images."""
