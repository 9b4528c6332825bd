"""Simulated federations: the command line, and the same from Python.

>>> from sims import run  # doctest: +SKIP
>>> result = run("digits", "rounds=5")  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sims.api import Result, resume, run
    from sims.comparison import Comparison, compare
    from sims.sweeps.api import Results, sweep

__all__ = ["Comparison", "Result", "Results", "compare", "resume", "run", "sweep"]
_MODULES = {"Comparison": "sims.comparison", "compare": "sims.comparison", "Results": "sims.sweeps.api",
            "sweep": "sims.sweeps.api"}  # fmt: skip


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: torch and Flower take seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'sims' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES.get(name, "sims.api")), name)
