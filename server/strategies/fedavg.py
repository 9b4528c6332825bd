"""FedAvg at the server (McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data)."""

from fedloom.server.strategies.averaging import STRATEGIES, Averaging


@STRATEGIES.register("fedavg")
class FedAvg(Averaging):
    """Average the sites that answered: w_{t+1} = sum n_k w_k / sum n_k (Alg. 1)."""
