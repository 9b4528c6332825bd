"""Show at once, in a terminal, that slow work such as an import has started."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedloom.conf.progress import progress_to

if TYPE_CHECKING:
    from rich.progress import Progress

LIBRARIES = "loading torch"


@contextmanager
def waiting(what: str, quiet: bool = False) -> Iterator[None]:
    """Show `what` on stderr inside the context; show nothing without a terminal or with `quiet`."""
    with _lines(quiet) as progress:
        progress.add_task(what)
        yield


@contextmanager
def steps_shown(quiet: bool = False) -> Iterator[None]:
    """Show each long step (conf.progress) of the code inside the context, in the same way as `waiting`."""
    with _lines(quiet) as progress:

        def report(what: str, done: int, of: int) -> None:
            for task in progress.task_ids if done in (0, of) else ():
                progress.remove_task(task)
            if done == 0:
                progress.add_task(what)

        with progress_to(report):
            yield


@contextmanager
def _lines(quiet: bool) -> "Iterator[Progress]":
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    off = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=off) as progress:
        yield progress
