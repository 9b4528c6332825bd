"""Runs' folders removed, and nothing else."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedloom.conf.errors import UserError
from fedloom.server.ledger.database import acquire, refuse_busy
from fedloom.server.run_folder.layout import BASELINES, RETRAINED
from fedloom.server.run_folder.listing import is_run, refuse_deleting, runs_in

PARTS = (BASELINES, RETRAINED)  # folders of what goes with a run


def removable(paths: Sequence[Path]) -> list[Path]:
    """The folders, each once. Raises UserError if one of them is not to be removed: then none is."""
    folders = list({path.resolve(): path for path in paths}.values())
    for path in folders:
        _check(path)
    return folders


def _check(path: Path) -> None:
    if path.is_symlink():
        raise UserError(f"{path}: is a link; name the folder that it leads to ({path.resolve()})")
    if not path.exists():
        raise UserError(f"{path}: is not there; 'fedloom runs {path.parent}' lists what is")
    whole = path.resolve()
    if whole.parent.name in PARTS and is_run(whole.parent.parent):
        raise UserError(f"{path}: is a part of the run {whole.parent.parent}; it goes with that")
    if is_run(path) and (inner := _inner(whole)):
        raise UserError(f"{path}: holds another run, {inner}; remove that first")
    refuse_deleting(path, to="removed")
    refuse_busy(path)
    if fixed := next((place for place, _, _ in os.walk(whole) if not os.access(place, os.R_OK | os.W_OK | os.X_OK)), None):
        raise UserError(f"{fixed}: is not writable, so that nothing in it can be removed; mend permissions first")


def _inner(path: Path) -> Path | None:
    """The first run in a run's folder that is no part of it."""
    folders = (place for place in sorted(path.iterdir()) if place.is_dir() and place.name not in PARTS)
    return next((run for folder in folders for run in runs_in(folder)), None)


def remove(path: Path) -> None:
    """Remove a run's folder; links in it are removed, not what they lead to. Raises UserError if it cannot be."""
    whole = path.resolve()
    gone = whole.with_name(f".{whole.name}.gone-{os.getpid()}")
    lock = acquire(whole)  # no server begins meanwhile
    try:
        whole.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        left = f"; what is left of the run is in {gone}" if gone.exists() else ""
        raise UserError(f"{error.filename or path}: cannot be removed ({error.strerror}){left}") from None
    finally:
        os.close(lock)
