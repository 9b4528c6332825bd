"""Engines carry messages between the ServerApp and many simulated sites. Each is one file, chosen by name."""

import contextlib
import importlib
import os
from collections.abc import Iterator

from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.sims.engines.adapter import LocalGrid
from fedloom.sims.engines.share import WHOLE, Share

# Ray reads this at its import. The pool reports a dead worker and its site, so Ray's own message is suppressed.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")

SIMULATED = ("inline", "ray")  # engines whose sites are on the user's own machines
# Modules by engine, imported on demand: only the ray engine needs Ray.
MODULES = {
    "inline": "fedloom.sims.engines.inline",
    "ray": "fedloom.sims.engines.ray",
    "flower": "fedloom.sims.engines.flower",
}


def can_start(config: Config) -> bool:
    """Return whether this program can start the run's engine. A federation without an address needs `flwr run`."""
    return config.engine.name in SIMULATED or bool(config.engine.address)


def refuse_engine(config: Config) -> None:
    """Raise UserError if this program cannot start the run's engine."""
    if not can_start(config):
        again = " --run-config 'overrides=\"... run.resume=true\"'" if config.run.resume else ""
        raise UserError(
            "engine.name: 'flower' is a real federation: name its folder in engine.address (`fedloom federation up` makes "
            f"one), or start the run with `flwr run .{again}`"
        )


@contextlib.contextmanager
def open_engine(config: Config, share: Share = WHOLE) -> Iterator[LocalGrid]:
    """Start the configured engine, yield its Flower Grid, whose nodes are the configuration's sites, and close it.

    Args:
        share: The run's part of the machine or cluster, if several runs use it at the same time.
    """
    refuse_engine(config)
    grid = importlib.import_module(MODULES[config.engine.name]).start(config, share=share)
    try:
        yield grid
    finally:
        grid.close()
