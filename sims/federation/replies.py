"""What a SuperLink takes of nodes: their own replies to its orders, of a bounded size, and nothing else.

Flower's (1.41) passes on what a node sends to whom the message names, so that a member could give orders to other sites; it
stores whatever a message says of itself, which may be nothing that it can read again; and it takes as many parts as come.
"""

import logging

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_object_id, get_object_tree
from flwr.supercore.utils import int64_to_uint64

from sims.federation.announced import Announced, Book, RefusedReplyError, check_tree
from sims.federation.clashes import clashes, has_come, messages_of, named, within
from sims.federation.doors import NODE

MOST_REASON = 2000  # letters of an error that a node sends
LONGEST_RUNTIME = 1e7  # seconds that a ClientApp may have taken, of those that are added up

DIVIDER = b"\x00"  # between a part's head and its body

log = logging.getLogger("flwr")

_store = SqlLinkState.store_message_and_object_tree
_store_object = SqlLinkState.store_object
_add_runtime = SqlLinkState.add_clientapp_runtime


def take_replies_alone() -> None:
    """From now on this process's SuperLink takes from nodes what it should."""
    book = Book()

    def announced(state: SqlLinkState, message: Message, object_tree: ObjectTree, session_id: str) -> tuple[bool, list[str]]:
        if (node := NODE.get()) is None:
            try:
                stored, missing = _store(state, message, object_tree, session_id)
            except ValueError:  # Flower's for parts that are known with others in them
                _give_way(state, book, clashes(state, object_tree))
                stored, missing = _store(state, message, object_tree, session_id)
            ids = book.order(message.metadata.run_id, object_tree) - set(missing)
            if ids and not book.sized(message.metadata.run_id):  # another run has sent the same
                book.sent(message.metadata.run_id, session_id, _held(state, ids))
            return stored, missing
        return _Reply(state, book, node, session_id).announced(message, object_tree)

    def came(state: SqlLinkState, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        if (node := NODE.get()) is None:
            book.sent(run_id, session_id, len(object_content))
            return _store_object(state, run_id, session_id, object_id, object_content)
        return _Reply(state, book, node, session_id).came(run_id, object_id, object_content)

    def ran(state: SqlLinkState, run_id: int, runtime: float) -> None:
        if NODE.get() is None or 0 <= runtime <= LONGEST_RUNTIME:  # false for what is not a number
            _add_runtime(state, run_id, runtime)

    SqlLinkState.store_message_and_object_tree = announced  # type: ignore[method-assign, assignment]
    SqlLinkState.store_object = came  # type: ignore[method-assign, assignment]
    SqlLinkState.add_clientapp_runtime = ran  # type: ignore[method-assign, assignment]


def _give_way(state: SqlLinkState, book: Book, parts: set[str]) -> None:
    """Refuse all replies that hold these parts and are announced."""
    for one in book.of(messages_of(state, parts)):
        _Reply(state, book, one.node, "")._refuse(one, "another message has a part of it, with others in it")


class _Reply:
    """What a node sends under a session."""

    def __init__(self, state: SqlLinkState, book: Book, node: int, session: str) -> None:
        self._state, self._book, self._node, self._session = state, book, node, session

    def announced(self, message: Message, tree: ObjectTree) -> tuple[bool, list[str]]:
        """Whether a reply is taken, and the parts that are missing of it. In place of one that is refused goes an error."""
        if (metadata := self._own(message.metadata)) is None:
            log.warning("node %s sent a message that is not its own reply to the server; it is dropped", self._node)
            self._close()
            return False, []
        try:
            check_tree(tree, self._book.most_parts(metadata.run_id))
            if tree.object_id != metadata.message_id:
                raise RefusedReplyError("its parts are another message's")
            if not self._book.holds(self._node, tree.object_id) and named(self._state, tree.object_id):
                raise RefusedReplyError("a message of its id, or a part, is there already")
            for old in self._book.announce(self._node, metadata.run_id, tree.object_id, self._session):
                self._drop(old)
            try:
                stored, missing = _store(self._state, _anew(message, metadata), tree, self._session)
            except ValueError:
                self._contest(clashes(self._state, tree))
                stored, missing = _store(self._state, _anew(message, metadata), tree, self._session)
        except ValueError as error:
            return self._fail(metadata, str(error)), []
        if not stored:
            self._close()
        return stored, missing

    def came(self, run: int, id: str, content: bytes) -> bool:
        """Whether a part is stored: it is announced, and the reply does not get too large."""
        found = self._book.take(self._node, self._session, len(content))
        if found is None or found.run != run:
            log.warning("node %s sent a part of nothing that it has announced; it is dropped", self._node)
            return False
        if found.taken > (most := self._book.most_bytes(run)):
            return self._refuse(found, f"it has more than {most >> 20} MiB")
        if self._holds_others(id, content):  # or else whoever announces this part truly is refused
            return self._refuse(found, "a part of it holds others than were announced")
        return _store_object(self._state, run, self._session, id, content)

    def _holds_others(self, id: str, content: bytes) -> bool:
        """Whether a part names parts that it was not announced with. False for what is no part: Flower refuses that."""
        if get_object_id(content) != id:
            return False
        named = content.partition(DIVIDER)[0].split(b" ")[1:2]
        held = {one.decode("ascii", "replace") for one in b"".join(named).split(b",") if one}
        return held != within(self._state, id)

    def _contest(self, parts: set[str]) -> None:
        """Have other nodes' replies give way that hold these parts with others in them than this one.

        RefusedReplyError where they are right: the bytes of a part prove what is in it, and an order is believed. Of what
        has not come yet nobody knows who is right.
        """
        if any(has_come(self._state, id) for id in parts) or messages_of(self._state, parts) - self._book.roots():
            raise RefusedReplyError("a part of it has others in it than were announced")
        _give_way(self._state, self._book, parts)

    def _refuse(self, one: Announced, why: str) -> bool:
        """Delete a reply, and have the run hear why if it has not fetched it yet. False: nothing is stored."""
        metadata = self._order_of(one)
        self._drop(one)
        if metadata is not None:
            self._session = self._state.start_session(one.run)
            self._fail(metadata, why)
        return False

    def _own(self, about: Metadata) -> Metadata | None:
        """A reply's metadata as the order has them; None: it is not this node's reply to an order."""
        if about.src_node_id != self._node or about.dst_node_id != SUPERLINK_NODE_ID or not about.reply_to_message_id:
            return None
        order = self._state.get_valid_message_ins(about.reply_to_message_id)
        if order is None or int64_to_uint64(order["dst_node_id"]) != self._node:
            return None
        if int64_to_uint64(order["run_id"]) != about.run_id:
            return None
        came = now().timestamp()
        return Metadata(
            about.run_id, about.message_id, self._node, SUPERLINK_NODE_ID, about.reply_to_message_id,
            order["group_id"], came, order["created_at"] + order["ttl"] - came, order["message_type"],
        )  # fmt: skip

    def _order_of(self, one: Announced) -> Metadata | None:
        """The metadata of a reply that is announced and has not been fetched yet."""
        rows = self._state.query("SELECT reply_to_message_id FROM message_res WHERE message_id = :root", {"root": one.root})
        if not rows:
            return None
        asked = rows[0]["reply_to_message_id"]
        return self._own(Metadata(one.run, one.root, one.node, SUPERLINK_NODE_ID, asked, "", 0.0, 0.0, "train"))

    def _drop(self, one: Announced) -> None:
        """Delete a reply with all parts of it."""
        self._book.forget(one)
        with self._state.session():
            self._state._cleanup_push_session(one.session, cleanup_messages=False)
            self._state.object_store.delete(one.root)
            self._state._on_push_session_expired({one.root})

    def _fail(self, metadata: Metadata, why: str) -> bool:
        """Have the run hear why a reply is refused. Whether it does."""
        log.warning("node %s: its reply is refused: %s", self._node, why)
        reason = f"its reply is refused: {why}"
        failed = make_message(metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason[:MOST_REASON]))
        id = failed.object_id
        failed.metadata.__dict__["_message_id"] = id
        stored, _ = _store(self._state, failed, get_object_tree(failed), self._session)
        if not stored:
            self._close()
        return stored and _store_object(self._state, metadata.run_id, self._session, id, failed.deflate())

    def _close(self) -> None:
        """Nothing comes under this session."""
        self._state._cleanup_push_session(self._session, cleanup_messages=False)


def _held(state: SqlLinkState, ids: set[str]) -> int:
    """Bytes of parts that are there."""
    return sum(len(state.object_store.get(id) or b"") for id in ids)


def _anew(message: Message, metadata: Metadata) -> Message:
    """A reply as it is stored: nothing that it says of itself but its id, and an error."""
    if not message.has_error():
        return make_message(metadata, content=RecordDict())
    reason = str(message.error.reason or "")[:MOST_REASON]
    return make_message(metadata, error=Error(message.error.code, reason))
