"""Simulated federations: the command line, the Python API, engines, sweeps, reports, experiments."""
