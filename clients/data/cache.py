"""The images a process used last, bounded by their bytes: a site of 50 images and one of 50,000 are not alike."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

from fedloom.clients.data.images import Images


class ImageCache:
    """Images by key, at most `limit` bytes in all (the newest one is kept whatever its size)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._kept: OrderedDict[Hashable, Images] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], Images]) -> Images:
        """The images kept under `key`; where there are none, those that `make` returns."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._lock:
            if key not in self._kept:  # another thread may have been faster
                self._kept[key] = made
                self.nbytes += made.nbytes
            while len(self._kept) > 1 and self.nbytes > self.limit:
                self.nbytes -= self._kept.popitem(last=False)[1].nbytes
        return made
