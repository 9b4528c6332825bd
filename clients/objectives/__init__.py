"""What sites minimise: one file per method, found by name."""

from clients.objectives.base import OBJECTIVES, Objective, Session, Task, objective_of
from clients.objectives.local import Local
from clients.objectives.sum_aggregation import SumAggregation

__all__ = ["OBJECTIVES", "Local", "Objective", "Session", "SumAggregation", "Task", "objective_of"]
