"""FedProx at the server (Li et al. 2020, Federated Optimization in Heterogeneous Networks): FedAvg."""

from fedloom.server.strategies.averaging import STRATEGIES
from fedloom.server.strategies.fedavg import FedAvg


@STRATEGIES.register("fedprox")
class FedProx(FedAvg):
    """The mean of sites that stay near the network that they were sent; `objective.mu` says how near."""

    default_objective = "fedprox"
