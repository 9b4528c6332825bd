"""Flower's own strategies (flwr.serverapp.strategy, flwr 1.41), used in place of Fedloom's strategies."""
