"""Fedloom from Python: run experiments, fuse networks, and write methods.

>>> import fedloom  # doctest: +SKIP
>>> result = fedloom.run("digits", "rounds=5")  # doctest: +SKIP

Each name is imported at its first use, because torch and Flower take seconds to import.
"""

import importlib
import os
import sys

TYPE_CHECKING = False  # not from typing: nothing may be imported here that a file beside a script can hide
if TYPE_CHECKING:
    from fedloom.clients.data import Examples
    from fedloom.clients.networks import Architecture, Model, Network, NetworkSpec, load_network, save_network
    from fedloom.clients.objectives import Experiment, Objective, PlainSession, Session, Task, state_of
    from fedloom.clients.objectives.averaging import FedAvgSession
    from fedloom.clients.objectives.fedavg import FedAvg
    from fedloom.clients.protocol.messages import MEAN, MODEL, ROUND, SITE, TRAIN
    from fedloom.clients.training.learner import learn
    from fedloom.conf import load
    from fedloom.conf.errors import UserError
    from fedloom.conf.typed import option
    from fedloom.fusion import FusionSettings, align, fuse
    from fedloom.fusion.state import State
    from fedloom.server.strategies import Models, PerClientSlot, RecordSpec, RoundContext, Strategy, Sum, View
    from fedloom.sims.api import resume, run
    from fedloom.sims.comparison import Comparison, compare
    from fedloom.sims.result import Result
    from fedloom.sims.sweeps.api import Results, sweep

    __version__: str

_PUBLIC = {
    # experiments
    "fedloom.sims.api": ("resume", "run"),
    "fedloom.sims.result": ("Result",),
    "fedloom.sims.sweeps.api": ("Results", "sweep"),
    "fedloom.sims.comparison": ("Comparison", "compare"),
    "fedloom.conf": ("load",),
    "fedloom.conf.errors": ("UserError",),
    # fusion of networks
    "fedloom.fusion": ("FusionSettings", "align", "fuse"),
    "fedloom.clients.networks": ("Architecture", "Model", "Network", "NetworkSpec", "load_network", "save_network"),
    # methods: the site's half, the server's half
    "fedloom.clients.objectives": ("Experiment", "Objective", "PlainSession", "Session", "Task", "state_of"),
    "fedloom.clients.objectives.fedavg": ("FedAvg",),
    "fedloom.clients.objectives.averaging": ("FedAvgSession",),
    "fedloom.clients.data": ("Examples",),
    "fedloom.clients.training.learner": ("learn",),
    "fedloom.clients.protocol.messages": ("MEAN", "MODEL", "ROUND", "SITE", "TRAIN"),
    "fedloom.conf.typed": ("option",),
    "fedloom.fusion.state": ("State",),
    "fedloom.server.strategies": ("PerClientSlot", "RecordSpec", "Models", "RoundContext", "Strategy", "Sum", "View"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [
    "MEAN",
    "MODEL",
    "ROUND",
    "SITE",
    "TRAIN",
    "Architecture",
    "Comparison",
    "Examples",
    "Experiment",
    "FedAvg",
    "FedAvgSession",
    "FusionSettings",
    "Model",
    "Models",
    "Network",
    "NetworkSpec",
    "Objective",
    "PerClientSlot",
    "PlainSession",
    "RecordSpec",
    "Result",
    "Results",
    "RoundContext",
    "Session",
    "State",
    "Strategy",
    "Sum",
    "Task",
    "UserError",
    "View",
    "align",
    "compare",
    "fuse",
    "learn",
    "load",
    "load_network",
    "option",
    "resume",
    "run",
    "save_network",
    "state_of",
    "sweep",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Return a public name from its module. Raises ImportError if a file next to the script hides a standard module."""
    if name == "__version__":
        from importlib.metadata import version

        return version("fedloom")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedloom' has no attribute '{name}'")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except Exception as error:
        if file := _hiding(error):
            module = os.path.splitext(os.path.basename(file))[0]
            raise ImportError(f"{file} hides the standard module '{module}': rename it") from error
        raise


def __dir__() -> list[str]:
    return [*__all__]


def _hiding(error: BaseException) -> str:
    """Return the file next to the script that hides a standard module, or an empty text."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in sys.stdlib_module_names]
    trace = error.__traceback__
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    script = os.path.abspath(sys.path[0])
    if script == os.path.dirname(os.__file__):
        return ""
    for file in filter(None, files):
        folder, name = os.path.split(os.path.abspath(file))
        if folder == script and os.path.splitext(name)[0] in sys.stdlib_module_names:
            return file
    return ""
