"""Typed configuration: dataclasses, the YAML experiments in this folder, and the code that merges them.

Each name is imported at its first use: `fedloom --help` needs none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedloom.conf.errors import UserError

if TYPE_CHECKING:
    from fedloom.conf.loading import experiment_names, from_json, load, to_json, to_yaml
    from fedloom.conf.schema import Config

__all__ = ["Config", "UserError", "experiment_names", "from_json", "load", "to_json", "to_yaml"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"{__name__}.{'schema' if name == 'Config' else 'loading'}"), name)
    globals()[name] = value
    return value
