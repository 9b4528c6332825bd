"""FedAvg at a site (McMahan et al. 2017, Alg. 1, ClientUpdate): cross-entropy, from the server's network on."""

from fedloom.clients.objectives.averaging import Averaged
from fedloom.clients.objectives.base import OBJECTIVES


@OBJECTIVES.register("fedavg")
class FedAvg(Averaged):
    """min F_k(w)."""
