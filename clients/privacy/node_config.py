"""Read settings of a node-config, which a SuperNode passes to its ClientApps. Raise UserError for an invalid one."""

import math
from collections.abc import Mapping
from typing import Any

from fedloom.conf.errors import UserError


def number(node_config: Mapping[str, Any], key: str, default: float, most: float = math.inf) -> float:
    """Return a number from 0 to `most`."""
    value = node_config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise UserError(
            f"{key}: got {value!r}, takes a number" + (f" from 0 to {most:g}" if math.isfinite(most) else " of at least 0")
        )
    return float(value)


def count(node_config: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    """Return a whole number of at least 0, or the default."""
    value = node_config.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UserError(f"{key}: got {value!r}, takes a whole number of at least 0")
    return value


def switch(node_config: Mapping[str, Any], key: str) -> bool:
    """Return true or false (the default)."""
    value = node_config.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{key}: got {value!r}, takes true or false")
    return value


def names(node_config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the names in a text with commas."""
    return tuple(name for part in str(node_config.get(key, "")).split(",") if (name := part.strip()))
