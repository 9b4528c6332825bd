"""FedProx at the server (Li et al. 2020, Federated Optimization in Heterogeneous Networks): the same step as FedAvg."""

from fedloom.server.strategies.base import STRATEGIES
from fedloom.server.strategies.fedavg import FedAvg


@STRATEGIES.register("fedprox")
class FedProx(FedAvg):
    """FedAvg over sites whose training stays near the server's network. `objective.mu` sets how near."""

    default_objective = "fedprox"
