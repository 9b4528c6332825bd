"""The Ray actor: imports the ClientApp once, then answers chunks of messages."""

import importlib
import time
from collections import OrderedDict
from typing import Any

import ray
from flwr.app import Context, Message

from sims.engines.adapter import answer, failure, site_context, take_identity, told
from sims.engines.marks import NOTHING, Marker, MarkFile
from sims.engines.wire import PackedArrays, Shared, pack, unpack

KEPT_RECORDS = 16  # shared records of the present round, and some of the one before


class Worker:
    """Answers messages for any site. `app` and `combine` are "module:attribute"; combine makes one of several replies.

    `cohort` > 1: that many sites of one shape are trained as one.
    """

    def __init__(self, app: str, combine: str, cohort: int, sites: int, store: str, mark: MarkFile) -> None:
        take_identity()
        self.app = _imported(app)
        self.combine = _imported(combine) if combine else None
        self.cohort, self.sites, self.store = cohort, sites, store
        self._marker = Marker(mark)
        self._records: OrderedDict[str, PackedArrays] = OrderedDict()

    def run(self, call: int, chunk: list[tuple[int, tuple[Any, ...]]]) -> tuple[float, list[tuple[Any, ...]]]:
        """Answer (site, packed message) pairs in order; seconds spent and the packed replies."""
        begin = time.perf_counter()
        asked = [(unpack(parts, self._fetch), site_context(site, self.sites, self.store)) for site, parts in chunk]
        replies = self._as_one(call, asked) if self.cohort > 1 else self._in_turn(call, asked)
        if self.combine is not None:
            replies = self.combine([message for message, _ in asked], replies)
        return time.perf_counter() - begin, [pack(reply) for reply in replies]

    def _in_turn(self, call: int, asked: list[tuple[Message, Context]]) -> list[Message]:
        replies = []
        for place, (message, context) in enumerate(asked):
            self._marker.write(call, place)
            replies.append(answer(self.app, message, context))
        return replies

    def _as_one(self, call: int, asked: list[tuple[Message, Context]]) -> list[Message]:
        """Train sites of one shape together; whatever is no train message is answered in turn."""
        from clients.cohort import same_shape, train_cohort
        from clients.job import read_job
        from clients.messages import TRAIN

        if len(asked) == 1 or any(message.metadata.message_type != TRAIN for message, _ in asked):
            return self._in_turn(call, asked)
        self._marker.write(call, NOTHING)
        replies: dict[int, Message] = {}
        try:
            jobs = [read_job(message, context) for message, context in asked]
            trained = [(group, train_cohort([jobs[place] for place in group])) for group in same_shape(jobs, self.cohort)]
        except Exception:  # of the joint step, such as too little memory for all: each site gets its own chance
            return self._in_turn(call, asked)
        for group, outcomes in trained:
            for place, done in zip(group, outcomes, strict=True):
                message = asked[place][0]
                failed = isinstance(done, Exception)
                replies[place] = failure(message, told(done)) if failed else Message(done, reply_to=message)
        return [replies[place] for place in range(len(asked))]

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
