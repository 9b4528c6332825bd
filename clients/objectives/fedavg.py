"""FedAvg at a site (McMahan et al. 2017, Alg. 1, ClientUpdate): cross-entropy, starting from the server's network."""

from fedloom.clients.objectives.averaging import Averaged
from fedloom.clients.objectives.base import OBJECTIVES


@OBJECTIVES.register("fedavg")
class FedAvg(Averaged):
    """min F_k(w)."""
