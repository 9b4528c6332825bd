"""Report the progress of long work to the function that a command has registered, if any."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
ProgressCallback = Callable[[str, int, int], None]  # what, parts done, parts in total (0: unknown)


def _ignore(what: str, done: int, of: int) -> None:
    return


_CALLBACK: ContextVar[ProgressCallback] = ContextVar("progress_callback", default=_ignore)


@contextlib.contextmanager
def progress_to(callback: ProgressCallback) -> Iterator[None]:
    """Send this thread's progress reports to a function, inside the context.

    Args:
        callback: Receives the name of the work, the number of finished parts, and the number of all parts (0: unknown).
    """
    before = _CALLBACK.set(callback)
    try:
        yield
    finally:
        _CALLBACK.reset(before)


def step(what: str, done: int, of: int = 0) -> None:
    """Report that `done` of `of` parts (0: unknown) of the work `what` are done. It is fast, so call it often."""
    _CALLBACK.get()(what, done, of)


@contextlib.contextmanager
def under_way(what: str) -> Iterator[None]:
    """Report the work `what`, which has no countable parts, as started before the context and as done after it."""
    step(what, 0, 1)
    try:
        yield
    finally:
        step(what, 1, 1)


def steps(what: str, items: Collection[T]) -> Iterator[T]:
    """Yield the items, and report the progress of the work `what` before each item."""
    for done, item in enumerate(items):
        step(what, done, len(items))
        yield item
    step(what, len(items), len(items))
