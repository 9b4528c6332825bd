"""Fedloom from Python: experiments, fusion of networks, and what a method of your own is made of.

>>> import fedloom  # doctest: +SKIP
>>> result = fedloom.run("digits", "rounds=5")  # doctest: +SKIP

Names are imported when they are asked for: torch and Flower take seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.clients.networks import Architecture, Network, NetworkSpec, load_network, save_network
    from fedloom.clients.objectives import Objective, Session
    from fedloom.conf import load
    from fedloom.conf.errors import UserError
    from fedloom.fusion import FusionSettings, align, fuse
    from fedloom.server.strategies import Strategy
    from fedloom.sims.api import Result, resume, run
    from fedloom.sims.comparison import Comparison, compare
    from fedloom.sims.sweeps.api import Results, sweep

_PUBLIC = {
    "fedloom.sims.api": ("Result", "resume", "run"),
    "fedloom.sims.comparison": ("Comparison", "compare"),
    "fedloom.sims.sweeps.api": ("Results", "sweep"),
    "fedloom.fusion": ("FusionSettings", "align", "fuse"),
    "fedloom.clients.networks": ("Architecture", "Network", "NetworkSpec", "load_network", "save_network"),
    "fedloom.clients.objectives": ("Objective", "Session"),
    "fedloom.server.strategies": ("Strategy",),
    "fedloom.conf": ("load",),
    "fedloom.conf.errors": ("UserError",),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [  # noqa: RUF022
    "run", "resume", "sweep", "compare", "load", "Result", "Results", "Comparison", "UserError",
    "fuse", "align", "FusionSettings", "load_network", "save_network",
    "Strategy", "Objective", "Session", "Network", "NetworkSpec", "Architecture",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A public name, from where it is defined."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedloom' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
