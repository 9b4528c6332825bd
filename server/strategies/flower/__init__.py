"""Flower's own strategies (flwr.serverapp.strategy, flwr 1.41) in the place of ours."""

from fedloom.server.strategies.flower.strategy import FlowerStrategy, flower_strategy

__all__ = ["FlowerStrategy", "flower_strategy"]
