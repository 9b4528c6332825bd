"""Results that follow from a configuration alone, worked out once for each Config object."""

import functools
from collections.abc import Callable
from typing import TypeVar

from fedloom.conf.schema import Config

T = TypeVar("T")


def once_while(state: Callable[[Config], object]) -> Callable[[Callable[[Config], T]], Callable[[Config], T]]:
    """Remember function(config) as long as state(config) is the same: of what depends on files, too."""

    def decorated(function: Callable[[Config], T]) -> Callable[[Config], T]:
        key = f"_{function.__module__}.{function.__qualname__}"

        @functools.wraps(function)
        def remembered(config: Config) -> T:
            kept, now = vars(config), state(config)
            if key not in kept or kept[key][0] != now:
                kept[key] = now, function(config)
            return kept[key][1]

        return remembered

    return decorated


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
