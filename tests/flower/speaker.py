"""A node with a registered key that speaks Flower's protocol itself: what a hostile operator may run in a SuperNode's place.

Flower's nodes run the app that the server names, but nobody can make an operator's machine do so: with its key it may answer
whatever it likes, and more than once. `python -m tests.flower.speaker HOME` is such a machine as a process of its own: it
trains as it should, but for the rounds that the file HOME/faults names: "3 NaN".
"""

import contextlib
import signal
import sys
import threading
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  # or else the first order waits for it
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from fedloom.clients.app import app
from fedloom.clients.protocol.bundles import BUNDLED, unbundled
from fedloom.clients.protocol.messages import METRICS, ORDER, TRAIN, read_order
from fedloom.sims.benchmarks.soak_replies import REFUSED
from fedloom.sims.federation.sheets import SITE, SiteSheet, node_config, read

POLL_SECONDS = 0.02
FAULTS = "faults"  # a file
LATE_SECONDS = 25.0  # later than a round waits


class Node(ABC):
    """Who answers orders."""

    def send(self, reply: Message) -> bool:
        """Send a message; whether any part of it was wanted."""
        parts = {id: part.deflate() for id, part in get_all_nested_objects(reply).items()}
        return self.push(reply, get_object_tree(reply), parts)

    @abstractmethod
    def push(self, reply: Message, tree: ObjectTree, parts: Mapping[str, bytes]) -> bool:
        """Send a message whose parts are these bytes, whatever they are."""


class Speaker(Node):
    """The connection of one node. `home`: its folder, with sheet and key."""

    def __init__(self, home: Path) -> None:
        self.home, self.sheet = home, read(SiteSheet, home / SITE)
        self.before: Message | None = None  # the last order
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Speaker":
        key: Any = load_ssh_private_key((self.home / self.sheet.key).read_bytes(), None)
        root = (self.home / self.sheet.certificate).read_bytes()
        there = self._open.enter_context(http_request_response(self.sheet.superlink, False, root, (key, key.public_key())))
        self.node, self._receive, self._announce, _, _, self._pull, self._push, self._confirm = there
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def take(self) -> Message | None:
        """The next message for this node, if there is one."""
        if (found := self._receive()) is None:
            return None
        run, id = found[0].metadata.run_id, found[0].metadata.message_id
        ids = [part.object_id for part in iterate_object_tree(found[1])]
        whole = inflate_object_from_contents(id, pull_objects(ids, lambda part: self._pull(run, part)))
        self._confirm(run, id)
        assert isinstance(whole, Message)
        whole.content = unbundled(whole.content)
        if ORDER in whole.content.config_records:
            whole.content.config_records[ORDER].pop(BUNDLED, None)
        whole.metadata.__dict__["_message_id"] = id
        return whole

    def honest(self, asked: Message) -> Message:
        """What the real ClientApp answers."""
        config = tomllib.loads(node_config(self.sheet, self.home))
        return app(asked, Context(asked.metadata.run_id, self.node, config, RecordDict(), {}))  # type: ignore[arg-type]

    def push(self, reply: Message, tree: ObjectTree, parts: Mapping[str, bytes]) -> bool:
        reply.metadata.__dict__["_message_id"] = tree.object_id
        wanted, session = self._announce(reply, tree, 0.0)
        for id in wanted & parts.keys():
            self._push(reply.metadata.run_id, session, id, parts[id])
        return bool(wanted)

    def answer(self, asked: Message, faults: Mapping[int, str]) -> None:
        """Answer as it should, or as the round's fault wants it."""
        reply = self.honest(asked)
        name = faults.get(read_order(asked.content).round, "") if asked.metadata.message_type == TRAIN else ""
        KINDS.get(name, changed)(self, asked, reply, name)
        self.before = asked


def part(kind: str, children: list[str], body: bytes) -> tuple[str, bytes]:
    """An object as Flower's SuperLink takes it, whatever its body says: its id and its bytes."""
    content = f"{kind} {','.join(children)} {len(body)}".encode() + b"\x00" + body
    return get_object_id(content), content


def bare(reply: Message, content: tuple[str, bytes], *more: tuple[str, bytes]) -> tuple[ObjectTree, dict[str, bytes]]:
    """The reply's message with this object in the place of its content, which is over `more`."""
    body = reply.deflate().partition(b"\x00")[2]
    root = part("Message", [content[0]], body)
    inner = ObjectTree(object_id=content[0], children=[ObjectTree(object_id=one[0]) for one in more])
    return ObjectTree(object_id=root[0], children=[inner]), dict([root, content, *more])


def changed(node: Speaker, asked: Message, reply: Message, name: str) -> None:
    """A reply whose content is changed (sims.benchmarks.soak_replies)."""
    node.send(REFUSED[name][0](reply) if name else reply)


def _late(node: Speaker, asked: Message, reply: Message, name: str) -> None:
    time.sleep(LATE_SECONDS)
    node.send(reply)


def _twice(node: Speaker, asked: Message, reply: Message, name: str) -> None:
    """The same again, and then another one."""
    node.send(reply)
    node.send(reply)
    other = Message(REFUSED["NaN"][0](reply).content, reply_to=asked)
    other.content.metric_records[METRICS]["loss"] = 0.5
    node.send(other)


def _another_run(node: Speaker, asked: Message, reply: Message, name: str) -> None:
    """The reply under another run's number, and to the order of the round before."""
    reply.metadata.__dict__["_run_id"] += 1
    with contextlib.suppress(Exception):
        node.send(reply)
    if node.before is not None:
        node.send(Message(reply.content, reply_to=node.before))


def _garbage(node: Speaker, asked: Message, reply: Message, name: str) -> None:
    node.push(reply, *bare(reply, part("RecordDict", [], b"\xff{ no JSON")))


def _no_records(node: Speaker, asked: Message, reply: Message, name: str) -> None:
    node.push(reply, *bare(reply, part("MetricRecord", [], b"")))


def _bomb(node: Speaker, asked: Message, reply: Message, name: str) -> None:
    """One megabyte that an array names a million times."""
    chunk = part("ArrayChunk", [], bytes(2**20))
    body = '{"dtype":"uint8","shape":[1],"stype":"numpy.ndarray","arraychunk_ids":[' + ",".join(["0"] * 10**6) + "]}"
    array = part("Array", [chunk[0]], body.encode())
    root = part("Message", [array[0]], reply.deflate().partition(b"\x00")[2])
    inner = ObjectTree(object_id=array[0], children=[ObjectTree(object_id=chunk[0])])
    node.push(reply, ObjectTree(object_id=root[0], children=[inner]), dict([root, array, chunk]))


def _half(node: Speaker, asked: Message, reply: Message, name: str) -> None:
    """Some of the reply never comes."""
    parts = {id: one.deflate() for id, one in get_all_nested_objects(reply).items()}
    node.push(reply, get_object_tree(reply), dict(list(parts.items())[:3]))


def _others_message(node: Speaker, asked: Message, reply: Message, name: str) -> None:
    """Inside, the reply says that it is another node's, to another message."""
    outer = Message(RecordDict(), reply_to=asked)
    reply.metadata.__dict__["_reply_to_message_id"] = "0" * 64
    reply.metadata.__dict__["_src_node_id"] = 7
    parts = {id: one.deflate() for id, one in get_all_nested_objects(reply).items()}
    node.push(outer, get_object_tree(reply), parts)


KINDS: dict[str, Callable[[Speaker, Message, Message, str], None]] = {
    "late": _late,
    "twice": _twice,
    "another run's": _another_run,
    "garbage": _garbage,
    "no records": _no_records,
    "a bomb": _bomb,
    "half": _half,
    "another's message": _others_message,
}


def main(home: Path) -> None:
    """Answer until a SIGTERM arrives."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with Speaker(home) as node:  # which says to the SuperLink that it goes
        while not stopped.is_set():
            with contextlib.suppress(RunNotRunningException):  # the run ended meanwhile
                if (asked := node.take()) is None:
                    time.sleep(POLL_SECONDS)
                    continue
                lines = (home / FAULTS).read_text().splitlines() if (home / FAULTS).is_file() else []
                node.answer(asked, {int(line.split()[0]): line.partition(" ")[2] for line in lines})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
