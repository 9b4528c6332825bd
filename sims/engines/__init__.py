"""Engines: what carries messages between the ServerApp and many simulated sites. One file each, found by name."""

import contextlib
import importlib
import os
from collections.abc import Iterator

from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.sims.engines.adapter import LocalGrid
from fedloom.sims.engines.share import WHOLE, Share

# Read when Ray is imported. A worker's death is our affair: the pool tells which site did it, and Ray need not shout.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")

# Modules by name, imported when asked for: Ray is needed by its own engine only.
SIMULATED = ("inline", "ray")  # whose sites are on the user's own machines
MODULES = {
    "inline": "fedloom.sims.engines.inline",
    "ray": "fedloom.sims.engines.ray",
    "flower": "fedloom.sims.engines.flower",
}


def can_start(config: Config) -> bool:
    """Whether the run's engine is one that we start ourselves: not a federation that `flwr run` speaks to."""
    return config.engine.name in SIMULATED or bool(config.engine.address)


def refuse_engine(config: Config) -> None:
    """UserError for an engine that is not ours to start."""
    if not can_start(config):
        again = " --run-config 'overrides=\"... run.resume=true\"'" if config.run.resume else ""
        raise UserError(
            "engine.name: 'flower' is a real federation: name its folder in engine.address ('fedloom federation up' makes "
            f"one), or start it with `flwr run .{again}`"
        )


@contextlib.contextmanager
def open_engine(config: Config, share: Share = WHOLE) -> Iterator[LocalGrid]:
    """The configured engine as a Flower Grid, its nodes being the configuration's sites; closed at the end in any case.

    `share`: of the machine or cluster, where several runs go on at once.
    """
    refuse_engine(config)
    grid = importlib.import_module(MODULES[config.engine.name]).start(config, share=share)
    try:
        yield grid
    finally:
        grid.close()
