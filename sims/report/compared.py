"""The file `compared.json` next to comparison pages: the runs that each page shows, so that requests name outdated pages."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from fedloom.clients.storage.states import write_bytes
from fedloom.server.run_folder.layout import COMPARED, REPORT

MOST_BYTES = 10_000_000  # of the file


def note_page(page: Path, runs: Iterable[Path]) -> None:
    """Note the runs that a page shows, and drop pages that do not exist any longer. Raises OSError."""
    pages = {name: shown for name, shown in _noted(page.parent).items() if (page.parent / name).is_file()}
    pages[page.name] = sorted({str(run.resolve()) for run in runs})
    write_bytes(page.with_name(COMPARED), json.dumps(pages, indent=1).encode(), private=True)


def pages_near(run: Path) -> tuple[list[Path], bool]:
    """Look for pages in the current folder, the run's, and the two above it.

    Returns:
        The pages that show the run, and whether it is known of all other pages there that they do not.
    """
    shown, unknown = [], False
    for folder in _folders(run):
        pages = _noted(folder)
        for page in sorted(folder.glob("*.html")):
            runs = pages.get(page.name, [])
            if str(run.resolve()) in runs:
                shown.append(page)
            elif not runs or not all(Path(each).is_dir() for each in runs):  # no note, or a run has moved since
                unknown = unknown or page.name != REPORT or folder.resolve() != run.resolve()
    return shown, not unknown


def _folders(run: Path) -> list[Path]:
    """Return these folders, each once. Those around the current folder are relative to it."""
    places = [Path(), run, run.parent, run.parent.parent]
    found: dict[Path, Path] = {}
    for place in places:
        with contextlib.suppress(OSError):  # the current folder does not exist any longer
            found.setdefault(place.resolve(), place)
    return list(found.values())


def _noted(folder: Path) -> dict[str, list[str]]:
    """Return the runs that each page in a folder shows; empty without the file, or if it is damaged."""
    path = folder / COMPARED
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            pages = json.loads(path.read_bytes())
            if isinstance(pages, dict) and all(map(_is_list_of_text, pages.values())):
                return pages
    return {}


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
