"""What takes seconds before there is anything else to show, such as an import: a terminal tells of it at once."""

from collections.abc import Iterator
from contextlib import contextmanager

LIBRARIES = "loading torch"


@contextmanager
def waiting(what: str, quiet: bool = False) -> Iterator[None]:
    """A line on stderr that lives while something takes long; nothing without a terminal, or if it is to be quiet."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    off = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=off) as progress:
        progress.add_task(what)
        yield
