"""Functions found by name in modules that are imported only when they are asked for."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from fedloom.conf.errors import unknown


def named(kind: str, name: str, modules: Mapping[str, str], function: str) -> Callable[..., Any]:
    """The function of the module that `modules` files under `name`; UserError with the nearest name otherwise."""
    if name not in modules:
        raise unknown(kind, name, modules)
    return getattr(importlib.import_module(modules[name]), function)
