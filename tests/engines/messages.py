"""Messages to an engine whose ClientApp does what they say (tests.engines.faulty), and what comes back."""

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedloom.conf import load
from fedloom.sims.engines.adapter import FIRST_NODE
from fedloom.sims.engines.ray import RayGrid, start

SITES = 12


def opened(root: Path, *words: str, app: str = "tests.engines.faulty:app") -> RayGrid:
    """Two workers; they take no cores, so that several grids have room in one Ray."""
    entry = f"sites=[{{domain: digits, count: {SITES}}}]"
    fixed = [entry, f"run.root={root}", "engine.workers=2", "engine.num_cpus=0"]
    return start(load("digits", [*fixed, *words]), app=app, combine="tests.engines.faulty:combine")


def answers(grid: RayGrid, keys: list[str], seconds: float) -> list[Message]:
    """The replies to all of these messages, or as many as there are after some time."""
    replies: list[Message] = []
    begin = time.monotonic()
    while len(replies) < len(keys) and time.monotonic() - begin < seconds:
        replies += grid.pull_messages(keys)
    return replies


def messages(faults: dict[int, dict[str, str]], size: int = 10) -> list[Message]:
    """One for every site, some with a fault."""
    shared = ArrayRecord([np.arange(size, dtype=np.float32)])
    made = []
    for site in range(SITES):
        content = RecordDict({"weights": shared, "own": ArrayRecord([np.full(3, site, np.float32)])})
        if site in faults:
            content["fault"] = ConfigRecord({**faults[site]})
        made.append(Message(content, FIRST_NODE + site, "train", group_id="1"))
    return made


def by_site(replies: Iterable[Message]) -> dict[int, Message]:
    """Replies by the place of their site."""
    return {reply.metadata.src_node_id - FIRST_NODE: reply for reply in replies}


def ask(grid: RayGrid, faults: dict[int, dict[str, str]], size: int = 10) -> dict[int, Message]:
    """Send every site a message, some with a fault; the replies by site, exactly one of each."""
    replies = list(grid.send_and_receive(messages(faults, size), timeout=120))
    found = by_site(replies)
    assert len(replies) == SITES and found.keys() == set(range(SITES)), "every site answers exactly once"
    return found


def assert_good(replies: dict[int, Message], but: set[int], size: int = 10) -> None:
    """All replies but some are what was sent, and these are errors."""
    for site, reply in replies.items():
        assert reply.has_error() == (site in but), (site, reply)
        if site not in but:
            np.testing.assert_array_equal(reply.content.array_records["own"].to_numpy_ndarrays()[0], np.full(3, site))
            np.testing.assert_array_equal(reply.content.array_records["echo"].to_numpy_ndarrays()[0], np.arange(size))


def pids(replies: dict[int, Message]) -> set[int]:
    """The processes of the workers that answered."""
    return {int(str(reply.content.metric_records["worker"]["pid"])) for reply in replies.values() if not reply.has_error()}
