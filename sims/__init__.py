"""Simulated federations: the command line, engines, sweeps, reports, experiments. From Python: fedloom.run and its kind."""
