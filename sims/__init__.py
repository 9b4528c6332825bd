"""Simulated federations: the command line, and the same from Python.

>>> from sims import run  # doctest: +SKIP
>>> result = run("digits", "rounds=5")  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sims.api import Result, resume, run

__all__ = ["Result", "resume", "run"]


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: torch and Flower take seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'sims' has no attribute '{name}'")
    from sims import api

    return getattr(api, name)
