"""The sites of a round as a strategy of Flower's sees them: a grid that knows nodes and carries nothing."""

import contextlib
import gc
import logging
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedloom.conf.errors import FailedError
from fedloom.conf.sites import Site

MOST_LOOKS = 100


class Nodes(Grid):
    """Node k + 1 is the site at place k of the roster. Messages are what `configure_train` gives; nothing else travels."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites, self._looks = {site.index + 1: site for site in sites}, 0

    def get_node_ids(self) -> Iterable[int]:
        """All nodes. FailedError for a strategy that waits for more of them."""
        self._looks += 1
        if self._looks > MOST_LOOKS:
            raise FailedError(f"strategy: waits for more sites than the {len(self.sites)} that take part")
        return list(self.sites)

    def set_run(self, run: Run) -> None:
        raise self._refused()

    @property
    def run(self) -> Run:
        raise self._refused()

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise self._refused()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise self._refused()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise self._refused()

    def _refused(self) -> FailedError:
        return FailedError("strategy: sends messages of its own; give them to configure_train's caller instead")


def take_identity() -> None:
    """Let this process create Flower messages, unless one of Flower's runtimes or an engine has done so: a request may be
    fulfilled where neither is.
    """
    try:
        _ = TaskIdentity.run_id
    except RuntimeError:
        TaskIdentity.task_id = TaskIdentity.run_id = 1
        TaskIdentity.node_id = SUPERLINK_NODE_ID


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let Flower's log tell of warnings only, and its strategies, some of which collect garbage after every array, find
    none of ours to look through."""
    log = logging.getLogger("flwr")
    before = log.level
    gc.freeze()
    try:
        log.setLevel(logging.WARNING)
        yield
    finally:
        log.setLevel(before)
        gc.unfreeze()


@contextlib.contextmanager
def drawing(generator: np.random.Generator) -> Iterator[None]:
    """Let what a strategy draws with Python's and NumPy's own generators follow from one of ours; theirs are put back."""
    before, numpy_before = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        random.seed(int(generator.integers(2**63)))
        np.random.seed(int(generator.integers(2**32)))  # noqa: NPY002
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)  # noqa: NPY002
