"""Caches of data: images in memory, and divisions of domains on disk."""

import contextlib
import io
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import Lock

import numpy as np

from fedloom.clients.data.examples import Examples
from fedloom.clients.data.sources import Positions
from fedloom.clients.storage.states import write_bytes


class ExampleCache:
    """A process's most recently used images by key, at most `limit` bytes in all. The newest entry always stays."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._images: OrderedDict[Hashable, Examples] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], Examples]) -> Examples:
        """Return the cached images for `key`, or call `make` and cache the result."""
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
                return self._images[key]
        made = make()
        with self._lock:
            if key not in self._images:  # another thread may have been faster
                self._images[key] = made
                self.nbytes += made.nbytes
            while len(self._images) > 1 and self.nbytes > self.limit:
                self.nbytes -= self._images.popitem(last=False)[1].nbytes
        return made


def folder() -> Path:
    """Return the folder of cached divisions, fedloom/divisions in $XDG_CACHE_HOME or ~/.cache. It may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom" / "divisions"


def cached(key: str, make: Callable[[], tuple[Positions, ...]]) -> tuple[Positions, ...]:
    """Return the positions that `make` returns, from disk if cached under `key`, a digest of everything they depend on.

    With the cache, a worker does not import flwr_datasets (2 s, half a GiB).
    """
    path = folder() / f"{key}.npz"
    missing_or_damaged = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile)
    with contextlib.suppress(*missing_or_damaged), np.load(path, allow_pickle=False) as file:
        return tuple(np.split(file["positions"], file["starts"]))
    parts = make()
    buffer = io.BytesIO()
    starts = np.cumsum([len(part) for part in parts])[:-1]
    np.savez(buffer, positions=np.concatenate(parts), starts=starts)
    with contextlib.suppress(OSError):  # without a writable folder it is made each time
        write_bytes(path, buffer.getvalue())
    return parts
