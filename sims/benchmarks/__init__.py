"""Measurements of time and memory, outside the tests. Each module has a function `bench` that returns tables and rows."""

MODULES = {
    "attacks": "fedloom.sims.benchmarks.attacks",
    "engines": "fedloom.sims.benchmarks.engines",
    "federation": "fedloom.sims.benchmarks.federation",
    "faults": "fedloom.sims.benchmarks.soak",
    "fusion": "fedloom.sims.benchmarks.fusion",
    "flat-memory": "fedloom.sims.benchmarks.flat_memory",
    "grid": "fedloom.sims.benchmarks.grid",
    "layer_selection": "fedloom.sims.benchmarks.layer_selection",
    "many-faults": "fedloom.sims.benchmarks.fault_run",
    "memory": "fedloom.sims.benchmarks.server_memory",
    "secure_aggregation": "fedloom.sims.benchmarks.secure_aggregation",
    "scale": "fedloom.sims.benchmarks.scale",
    "unlearning": "fedloom.sims.benchmarks.unlearning",
    "vectorise": "fedloom.sims.benchmarks.vectorise",
}
