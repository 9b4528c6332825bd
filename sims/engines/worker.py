"""The Ray actor: imports the ClientApp once, then answers chunks of messages."""

import importlib
import time
from collections import OrderedDict
from typing import Any

import ray

from sims.engines.adapter import answer, site_context, take_identity
from sims.engines.marks import Marker, MarkFile
from sims.engines.wire import PackedArrays, Shared, pack, unpack

KEPT_RECORDS = 16  # shared records of the present round, and some of the one before


class Worker:
    """Answers messages for any site. `app` and `combine` are "module:attribute"; combine makes one of several replies."""

    def __init__(self, app: str, combine: str, sites: int, store: str, mark: MarkFile) -> None:
        take_identity()
        self.app = _imported(app)
        self.combine = _imported(combine) if combine else None
        self.sites, self.store = sites, store
        self._marker = Marker(mark)
        self._records: OrderedDict[str, PackedArrays] = OrderedDict()

    def run(self, call: int, chunk: list[tuple[int, tuple[Any, ...]]]) -> tuple[float, list[tuple[Any, ...]]]:
        """Answer (site, packed message) pairs in order; seconds spent and the packed replies."""
        begin = time.perf_counter()
        asked, replies = [], []
        for place, (site, parts) in enumerate(chunk):
            self._marker.write(call, place)
            asked.append(unpack(parts, self._fetch))
            replies.append(answer(self.app, asked[-1], site_context(site, self.sites, self.store)))
        if self.combine is not None:
            replies = self.combine(asked, replies)
        return time.perf_counter() - begin, [pack(reply) for reply in replies]

    def _fetch(self, shared: Shared) -> PackedArrays:
        key = shared.reference.hex()
        if key not in self._records:
            self._records[key] = ray.get(shared.reference)
            while len(self._records) > KEPT_RECORDS:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return self._records[key]


def _imported(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
