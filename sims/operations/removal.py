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
    resolved = path.resolve()
    if resolved.parent.name in PARTS and is_run(resolved.parent.parent):
        raise UserError(f"{path}: is a part of the run {resolved.parent.parent}; it goes with that")
    if is_run(path) and (inner := _inner(resolved)):
        raise UserError(f"{path}: holds another run, {inner}; remove that first")
    refuse_deleting(path, to="removed")
    refuse_busy(path)
    if locked := next(
        (folder for folder, _, _ in os.walk(resolved) if not os.access(folder, os.R_OK | os.W_OK | os.X_OK)), None
    ):
        raise UserError(f"{locked}: is not writable, so that nothing in it can be removed; mend permissions first")


def _inner(path: Path) -> Path | None:
    """The first run in a run's folder that is no part of it."""
    inside = (folder for folder in sorted(path.iterdir()) if folder.is_dir() and folder.name not in PARTS)
    return next((run for folder in inside for run in runs_in(folder)), None)


def remove(path: Path) -> None:
    """Remove a run's folder; links in it are removed, not what they lead to. Raises UserError if it cannot be."""
    resolved = path.resolve()
    gone = resolved.with_name(f".{resolved.name}.gone-{os.getpid()}")
    lock = acquire(resolved)  # no server begins meanwhile
    try:
        resolved.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        left = f"; what is left of the run is in {gone}" if gone.exists() else ""
        raise UserError(f"{error.filename or path}: cannot be removed ({error.strerror}){left}") from None
    finally:
        os.close(lock)
