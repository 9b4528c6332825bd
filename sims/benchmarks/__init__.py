"""Measurements of time and memory; never part of the tests. Each module has a function `bench`: a table, and its rows."""

MODULES = {"memory": "sims.benchmarks.server_memory"}
