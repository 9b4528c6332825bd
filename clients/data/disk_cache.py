"""Divisions of domains kept on disk, so that a worker need not import flwr_datasets (2 s, half a GiB) to look one up."""

import contextlib
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedloom.clients.data.sources import Positions
from fedloom.clients.storage.states import write_bytes


def folder() -> Path:
    """$XDG_CACHE_HOME/fedloom/divisions, usually in ~/.cache; may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom" / "divisions"


def kept(key: str, make: Callable[[], tuple[Positions, ...]]) -> tuple[Positions, ...]:
    """What `make` gives, from disk if it was made before under this key (a digest of everything it depends on)."""
    path = folder() / f"{key}.npz"
    missing_or_damaged = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile)
    with contextlib.suppress(*missing_or_damaged), np.load(path, allow_pickle=False) as file:
        return tuple(np.split(file["positions"], file["starts"]))
    parts = make()
    buffer = io.BytesIO()
    starts = np.cumsum([len(part) for part in parts])[:-1]
    np.savez(buffer, positions=np.concatenate(parts), starts=starts)
    with contextlib.suppress(OSError):  # nowhere to write: then it is made each time
        write_bytes(path, buffer.getvalue())
    return parts
