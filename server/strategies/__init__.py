"""What the server does with the replies: one file per method, found by name."""

from server.strategies.base import STRATEGIES, Aggregation, ReplyError, Setup, Strategy
from server.strategies.sum_aggregation import SumAggregationStrategy

__all__ = ["STRATEGIES", "Aggregation", "ReplyError", "Setup", "Strategy", "SumAggregationStrategy"]
