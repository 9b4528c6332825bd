"""The Ray actor: imports the ClientApp once, then answers chunks of messages."""

import importlib
import time
from collections import OrderedDict
from typing import Any

import ray

from sims.engines.adapter import answer, site_context, take_identity
from sims.engines.wire import PackedArrays, Shared, pack, unpack

KEPT_RECORDS = 16  # shared records of the present round, and some of the one before


class Worker:
    """Answers messages for any site. `app` is "module:attribute"."""

    def __init__(self, app: str, sites: int, store: str) -> None:
        take_identity()
        module, _, attribute = app.partition(":")
        self.app = getattr(importlib.import_module(module), attribute)
        self.sites, self.store = sites, store
        self._records: OrderedDict[str, PackedArrays] = OrderedDict()

    def ready(self) -> bool:
        """True once the app is imported."""
        return True

    def run(self, chunk: list[tuple[int, tuple[Any, ...]]]) -> tuple[float, list[tuple[Any, ...]]]:
        """Answer (site, packed message) pairs in order; seconds spent and the packed replies."""
        begin = time.perf_counter()
        replies = []
        for site, parts in chunk:
            message = unpack(parts, self._fetch)
            replies.append(pack(answer(self.app, message, site_context(site, self.sites, self.store))))
        return time.perf_counter() - begin, replies

    def _fetch(self, shared: Shared) -> PackedArrays:
        key = shared.reference.hex()
        if key not in self._records:
            self._records[key] = ray.get(shared.reference)
            while len(self._records) > KEPT_RECORDS:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return self._records[key]
