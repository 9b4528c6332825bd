"""What the server does with the replies: one file per method, found by name."""

from server.strategies.arithmetic import ArithmeticStrategy
from server.strategies.base import STRATEGIES, Aggregation, ReplyError, Setup, Strategy, Turn
from server.strategies.sum_aggregation import SumAggregationStrategy

__all__ = [
    "STRATEGIES",
    "Aggregation",
    "ArithmeticStrategy",
    "ReplyError",
    "Setup",
    "Strategy",
    "SumAggregationStrategy",
    "Turn",
]
