"""How far a longer piece of work is, told to whoever listens; nobody does unless a command shows it."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Hears = Callable[[str, int, int], None]  # what is done, how many parts of it, of how many (0: nobody knows)


def _nobody(what: str, done: int, of: int) -> None:
    return


_HEARS: ContextVar[Hears] = ContextVar("hears", default=_nobody)


@contextlib.contextmanager
def heard(hears: Hears) -> Iterator[None]:
    """Within it, `hears` is told of all steps of this thread."""
    before = _HEARS.set(hears)
    try:
        yield
    finally:
        _HEARS.reset(before)


def step(what: str, done: int, of: int = 0) -> None:
    """Tell that `done` of `of` parts are done; cheap, so that it may be called often."""
    _HEARS.get()(what, done, of)


@contextlib.contextmanager
def under_way(what: str) -> Iterator[None]:
    """Tell of a step of one part, such as the start of a program, while it lasts."""
    step(what, 0, 1)
    try:
        yield
    finally:
        step(what, 1, 1)


def steps(what: str, items: Collection[T]) -> Iterator[T]:
    """The items, each told before it is worked on."""
    for done, item in enumerate(items):
        step(what, done, len(items))
        yield item
    step(what, len(items), len(items))
