"""Compare runs: means over seeds, paired differences, curves and cost."""

from fedloom.sims.comparison.compare import Comparison, compare, compared

__all__ = ["Comparison", "compare", "compared"]
