"""Runs' folders removed, and nothing else."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from conf.errors import UserError
from server.ledger.database import acquire, refuse_busy
from server.runs import BASELINES, is_run, runs_in


def removable(paths: Sequence[Path]) -> list[Path]:
    """The folders, each once. Raises UserError if one of them is not to be removed: then none is."""
    folders = list({path.resolve(): path for path in paths}.values())
    for path in folders:
        _check(path)
    return folders


def _check(path: Path) -> None:
    if path.is_symlink():
        raise UserError(f"{path}: is a link; name the folder that it leads to ({path.resolve()})")
    if not is_run(path):
        raise UserError(f"{path}: is no run of fedloom, and is not removed; name the folder of a run")
    whole = path.resolve()
    if whole.parent.name == BASELINES and is_run(whole.parent.parent):
        raise UserError(f"{path}: is a baseline of the run {whole.parent.parent}; it goes with that")
    if inner := [one for place in whole.iterdir() if place.is_dir() and place.name != BASELINES for one in runs_in(place)]:
        raise UserError(f"{path}: holds another run, {inner[0]}; remove that first")
    refuse_busy(path)


def remove(path: Path) -> None:
    """Remove a run's folder; links in it are removed, not what they lead to. Raises UserError if it cannot be."""
    whole = path.resolve()
    gone = whole.with_name(f".{whole.name}.gone-{os.getpid()}")
    lock = acquire(whole)  # no server begins meanwhile
    try:
        whole.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be removed ({error.strerror})") from None
    finally:
        os.close(lock)
