"""Measurements of time and memory, outside the tests. Each module in MODULES has a function `bench`: tables and rows."""

NAMES = ("attacks", "engines", "faults", "federation", "flat_memory", "fusion", "grid", "layer_selection", "many_faults",
         "memory", "peers", "scale", "secure_aggregation", "unlearning", "vectorise")  # fmt: skip
MODULES = {name: f"fedloom.sims.benchmarks.{name}" for name in NAMES}
