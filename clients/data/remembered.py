"""A cache of results that depend on a configuration and on files, valid while the files are unchanged."""

import functools
from collections.abc import Callable
from typing import TypeVar

from fedloom.conf.schema import Config

T = TypeVar("T")


def while_same(state: Callable[[Config], object]) -> Callable[[Callable[[Config], T]], Callable[[Config], T]]:
    """Return a decorator that caches function(config) while state(config), a digest of files, is unchanged."""

    def decorated(function: Callable[[Config], T]) -> Callable[[Config], T]:
        key = f"_{function.__module__}.{function.__qualname__}"

        @functools.wraps(function)
        def remembered(config: Config) -> T:
            cache, now = vars(config), state(config)
            if key not in cache or cache[key][0] != now:
                cache[key] = now, function(config)
            return cache[key][1]

        return remembered

    return decorated
