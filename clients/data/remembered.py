"""Results that follow from a configuration and from files, remembered as long as the files are as they were."""

import functools
from collections.abc import Callable
from typing import TypeVar

from fedloom.conf.schema import Config

T = TypeVar("T")


def while_same(state: Callable[[Config], object]) -> Callable[[Callable[[Config], T]], Callable[[Config], T]]:
    """Remember function(config) for as long as state(config), of the files, is the same. A Config is frozen."""

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
