"""The sites of a round as a Flower strategy sees them: a grid that knows nodes but sends no messages."""

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
from fedloom.conf.randomness import GLOBAL
from fedloom.conf.sites import Site

MAX_QUERIES = 100


class Nodes(Grid):
    """A grid in which node k + 1 is the site at index k of the roster. Messages come only from `configure_train`."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites, self._queries = {site.index + 1: site for site in sites}, 0

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes.

        Raises:
            FailedError: The strategy keeps asking, because it waits for more nodes.
        """
        self._queries += 1
        if self._queries > MAX_QUERIES:
            raise FailedError(f"strategy: it waits for more sites than the {len(self.sites)} that participate")
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
        return FailedError("strategy: it sends messages itself; return them from configure_train instead")


def take_identity() -> None:
    """Allow this process to create Flower messages, unless a Flower runtime or an engine has done so.

    A request may run in a process without either.
    """
    try:
        _ = TaskIdentity.run_id
    except RuntimeError:
        TaskIdentity.task_id = TaskIdentity.run_id = 1
        TaskIdentity.node_id = SUPERLINK_NODE_ID


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within the context, limit Flower's log to warnings, and hide our objects from the garbage collector.

    Some Flower strategies collect garbage after every array.
    """
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
    """Seed Python's and NumPy's global generators from `generator`, and restore their states afterwards."""
    with GLOBAL:
        before, numpy_before = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            random.seed(int(generator.integers(2**63)))
            np.random.seed(int(generator.integers(2**32)))  # noqa: NPY002
            yield
        finally:
            random.setstate(before)
            np.random.set_state(numpy_before)  # noqa: NPY002
