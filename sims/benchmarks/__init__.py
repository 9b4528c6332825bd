"""Measurements of time and memory; never part of the tests. Each module has a function `bench`: tables, and its rows."""

MODULES = {
    "attacks": "sims.benchmarks.attacks",
    "engines": "sims.benchmarks.engines",
    "federation": "sims.benchmarks.federation",
    "faults": "sims.benchmarks.soak",
    "fusion": "sims.benchmarks.fusion",
    "flat-memory": "sims.benchmarks.flat_memory",
    "grid": "sims.benchmarks.grid",
    "layer_selection": "sims.benchmarks.layer_selection",
    "many-faults": "sims.benchmarks.fault_run",
    "memory": "sims.benchmarks.server_memory",
    "secure_aggregation": "sims.benchmarks.secure_aggregation",
    "scale": "sims.benchmarks.scale",
    "unlearning": "sims.benchmarks.unlearning",
    "vectorise": "sims.benchmarks.vectorise",
}
