"""Remove the folders of runs, and nothing else."""

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from fedloom.conf.errors import UserError
from fedloom.server.ledger.database import acquire, refuse_busy
from fedloom.server.run_folder.layout import BASELINES, RETRAINED
from fedloom.server.run_folder.listing import is_run, refuse_deleting, runs_in

PARTS = (BASELINES, RETRAINED)  # folders inside a run that are part of it


def removable(paths: Sequence[Path]) -> list[Path]:
    """Return the runs' folders, each once. Raises UserError if any of them must not be removed."""
    folders = list({path.resolve(): path for path in paths}.values())
    for path in folders:
        _check(path)
    return folders


def _check(path: Path) -> None:
    if path.is_symlink():
        raise UserError(f"{path}: is a link; name its target ({path.resolve()})")
    if not path.exists():
        raise UserError(f"{path}: does not exist; 'fedloom runs {path.parent}' lists the runs there")
    resolved = path.resolve()
    if resolved.parent.name in PARTS and is_run(resolved.parent.parent):
        raise UserError(f"{path}: is part of the run {resolved.parent.parent}; remove that run instead")
    if is_run(path) and (inner := _inner(resolved)):
        raise UserError(f"{path}: contains another run, {inner}; remove that one first")
    refuse_deleting(path, to="removed")
    refuse_busy(path)
    if locked := next(
        (folder for folder, _, _ in os.walk(resolved) if not os.access(folder, os.R_OK | os.W_OK | os.X_OK)), None
    ):
        raise UserError(f"{locked}: is not writable, so its files cannot be removed; change its permissions first")


def _inner(path: Path) -> Path | None:
    """Return the first other run inside a run's folder, or None."""
    inside = (folder for folder in sorted(path.iterdir()) if folder.is_dir() and folder.name not in PARTS)
    return next((run for folder in inside for run in runs_in(folder)), None)


def remove(path: Path) -> None:
    """Remove a run's folder. Links in it are removed, their targets stay. Raises UserError if a file cannot be removed."""
    resolved = path.resolve()
    gone = resolved.with_name(f".{resolved.name}.gone-{uuid.uuid4().hex[:12]}")
    lock = acquire(resolved)  # no server can start on the run meanwhile
    try:
        resolved.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        left = f"; the rest of the run is in {gone}" if gone.exists() else ""
        raise UserError(f"{error.filename or path}: cannot be removed ({error.strerror}){left}") from None
    finally:
        os.close(lock)
