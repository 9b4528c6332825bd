"""Compare runs: means over seeds, paired differences, curves and cost."""

from fedloom.sims.comparison.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
