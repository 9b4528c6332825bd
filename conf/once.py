"""Results that follow from a configuration alone, worked out once for each Config object."""

import functools
from collections.abc import Callable
from typing import TypeVar

from conf.schema import Config

T = TypeVar("T")


def once(function: Callable[[Config], T]) -> Callable[[Config], T]:
    """Remember function(config) for as long as the config lives; a Config is frozen, its results never change."""
    key = f"_{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def remembered(config: Config) -> T:
        kept = vars(config)
        if key not in kept:
            kept[key] = function(config)
        return kept[key]

    return remembered
