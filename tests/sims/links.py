"""A SuperLink's real database with a run and two nodes of it, in this process."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink.federation import NoOpFederationManager

from fedloom.sims.federation.doors import NODE
from fedloom.sims.federation.long_polling import Signals
from fedloom.sims.federation.replies import take_replies_alone


def leaf(text: str) -> ObjectTree:
    """A part that is nothing."""
    return ObjectTree(object_id=hashlib.sha256(text.encode()).hexdigest())


@dataclass
class Link:
    """A SuperLink's database, a run, and two nodes of it; the second one is hostile."""

    state: SqlLinkState
    run: int
    nodes: tuple[int, int]

    def order(self, node: int, content: RecordDict | None = None) -> str:
        """Send a node an order; its id."""
        content = content or RecordDict({"o": ConfigRecord({"n": str(now())})})
        metadata = Metadata(self.run, "", SUPERLINK_NODE_ID, node, "", "1", now().timestamp(), 600.0, "train")
        message = make_message(metadata, content=content)
        message.metadata.__dict__["_message_id"] = message.object_id
        session, tree = self.state.start_session(self.run), get_object_tree(message)
        stored, missing = self.state.store_message_and_object_tree(message, tree, session)
        assert stored
        for id, part in get_all_nested_objects(message).items():
            assert id not in missing or self.state.store_object(self.run, session, id, part.deflate())
        return message.object_id

    def reply(self, node: int, asked: str, **more: Any) -> Message:
        """What a node would answer."""
        content = RecordDict({"r": ConfigRecord({"node": str(node)})})
        about = {"run_id": self.run, "src_node_id": node, "dst_node_id": SUPERLINK_NODE_ID, "reply_to_message_id": asked}
        about |= {"created_at": now().timestamp(), "ttl": 60.0, "group_id": "1", "message_type": "train", "message_id": ""}
        message = make_message(Metadata(**{**about, **more}), content=content)
        message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def send(self, node: int, reply: Message, tree: ObjectTree | None = None) -> tuple[bool, list[str], str]:
        """Announce a reply as a node; whether it is taken, what is missing, under which session."""
        with speaking(node):
            session = self.state.start_session(self.run)
            taken = self.state.store_message_and_object_tree(reply, tree or get_object_tree(reply), session)
        return *taken, session

    def whole(self, node: int, reply: Message) -> bool:
        """Send all of a reply as a node."""
        taken, missing, session = self.send(node, reply)
        parts = get_all_nested_objects(reply)
        with speaking(node):
            return taken and all(self.state.store_object(self.run, session, id, parts[id].deflate()) for id in missing)

    def received(self, asked: str) -> Message | None:
        """Return the reply to an order that the run receives; None without one."""
        found = self.state.get_message_res({asked}, self.run)
        return found[0] if found else None

    def sessions(self) -> int:
        """Under which something may come."""
        return self.state.query("SELECT count(*) AS n FROM object_push_sessions")[0]["n"]


@contextlib.contextmanager
def speaking(node: int | None) -> Iterator[None]:
    """Say something as a node."""
    token = NODE.set(node)
    try:
        yield
    finally:
        NODE.reset(token)


def new_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Link:
    """Such a database in a folder."""
    for name in ("store_message_and_object_tree", "store_object", "add_clientapp_runtime"):
        monkeypatch.setattr(SqlLinkState, name, getattr(SqlLinkState, name))  # as it is, afterwards
    take_replies_alone(Signals())
    path = str(tmp_path / "state.db")
    store = SqlObjectStore(path)
    state = SqlLinkState(path, NoOpFederationManager(), store)
    state.initialize()
    store.initialize()
    nodes = [state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=key.decode()) for key in (b"a", b"b")]
    for node in nodes:
        assert state.activate_node(node, 600)
    run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
    return Link(state, run, (nodes[0], nodes[1]))
