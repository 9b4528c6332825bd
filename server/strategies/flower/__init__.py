"""Flower's own strategies (flwr.serverapp.strategy, flwr 1.41) in the place of ours."""
