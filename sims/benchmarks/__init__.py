"""Measurements of time and memory; never part of the tests. Each module has a function `bench`: tables, and its rows."""

MODULES = {
    "engines": "sims.benchmarks.engines",
    "faults": "sims.benchmarks.fault_run",
    "fusion": "sims.benchmarks.fusion",
    "flat-memory": "sims.benchmarks.flat_memory",
    "grid": "sims.benchmarks.grid",
    "memory": "sims.benchmarks.server_memory",
    "unlearning": "sims.benchmarks.unlearning",
    "vectorise": "sims.benchmarks.vectorise",
}
