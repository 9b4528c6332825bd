"""Accept from nodes only their own replies to the SuperLink's orders, of a bounded size.

Flower (1.41) forwards a node's message to any receiver, so that a member could send orders to other sites. It stores the
message's metadata unchecked, and any number of parts. It stores one part for each hash, with the content that the first
sender announces. Here each node has its own part ids (`private`), so that it cannot disturb orders or other nodes' replies.
"""

import hmac
import logging
import secrets

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    UnexpectedObjectContentError,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.utils import int64_to_uint64

from fedloom.sims.federation.announced import Announced, Book, RefusedReplyError, check_tree
from fedloom.sims.federation.bodies import SMALL
from fedloom.sims.federation.doors import NODE, REPLY
from fedloom.sims.federation.long_polling import Incoming, Signals

MOST_REASON = 2000  # characters of a node's error
LONGEST_RUNTIME = 1e7  # seconds of a ClientApp that count in Flower's sums

SALT = secrets.token_bytes(32)  # runs end with this process, so a new salt is safe
DIVIDER = b"\x00"  # between the head and the body of a part

log = logging.getLogger("flwr")

_store = SqlLinkState.store_message_and_object_tree
_store_object = SqlLinkState.store_object
_add_runtime = SqlLinkState.add_clientapp_runtime


def take_replies_alone(news: Signals) -> None:
    """Make this process's SuperLink accept from nodes only their own replies. It notifies `news` of complete messages."""
    book, incoming = Book(), Incoming(news.notify)

    def announced(state: SqlLinkState, message: Message, object_tree: ObjectTree, session_id: str) -> tuple[bool, list[str]]:
        if (node := NODE.get()) is None:
            stored, missing = _store(state, message, object_tree, session_id)
            incoming.announced(session_id, message.metadata.dst_node_id, missing)
            ids = book.order(message.metadata.run_id, object_tree) - set(missing)
            if ids and not book.sized(message.metadata.run_id):  # another run has sent the same parts
                book.sent(message.metadata.run_id, session_id, _held(state, ids))
            return stored, missing
        return _Reply(state, book, incoming, node, session_id).announced(message, object_tree)

    def came(state: SqlLinkState, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        state.object_store.verify = False  # type: ignore[attr-defined]  # _is_part verifies the hash instead
        if not _is_part(object_id, object_content):
            return False
        if (node := NODE.get()) is None:
            book.sent(run_id, session_id, len(object_content))
            stored = _store_object(state, run_id, session_id, object_id, object_content)
        else:
            stored = _Reply(state, book, incoming, node, session_id).came(run_id, object_id, object_content)
            if stored and len(object_content) > SMALL:  # the run can fetch it before the others have come
                news.notify(REPLY)
        incoming.came(session_id, object_id)
        return stored

    def ran(state: SqlLinkState, run_id: int, runtime: float) -> None:
        if NODE.get() is None or 0 <= runtime <= LONGEST_RUNTIME:  # also false for NaN
            _add_runtime(state, run_id, runtime)

    SqlLinkState.store_message_and_object_tree = announced  # type: ignore[method-assign, assignment]
    SqlLinkState.store_object = came  # type: ignore[method-assign, assignment]
    SqlLinkState.add_clientapp_runtime = ran  # type: ignore[method-assign, assignment]


class _Reply:
    """A reply that a node sends in a session."""

    def __init__(self, state: SqlLinkState, book: Book, incoming: Incoming, node: int, session: str) -> None:
        self._state, self._book, self._incoming, self._node, self._session = state, book, incoming, node, session

    def announced(self, message: Message, tree: ObjectTree) -> tuple[bool, list[str]]:
        """Return whether the reply is accepted, and its missing parts. Stores an error instead of a refused reply."""
        if (metadata := self._own(message.metadata)) is None:
            log.warning("node %s sent a message that is not its own reply to the server; it is dropped", self._node)
            self._close()
            return False, []
        try:
            check_tree(tree, self._book.most_parts(metadata.run_id))
            if tree.object_id != message.metadata.message_id:
                raise RefusedReplyError("its parts are another message's")
            names = {private(self._node, part.object_id): part.object_id for part in iterate_object_tree(tree)}
            tree = _private_tree(self._node, tree)
            for old in self._book.announce(self._node, metadata.run_id, tree.object_id, self._session):
                self._drop(old)
            stored, missing = _store(self._state, _anew(message, metadata), tree, self._session)
        except ValueError as error:  # from Flower, for known parts with different contents
            return self._fail(metadata, str(error)), []
        if not stored:
            self._close()
            return False, []
        parts = [names[id] for id in missing]
        self._incoming.announced(self._session, REPLY, parts)
        return True, parts

    def came(self, run: int, id: str, content: bytes) -> bool:
        """Store a part if it was announced and the reply is not too large. Return whether it was stored."""
        reply = self._book.take(self._node, self._session, len(content))
        if reply is None or reply.run != run:
            log.warning("node %s sent a part that it has not announced; it is dropped", self._node)
            return False
        if reply.taken > (most := self._book.most_bytes(run)):
            return self._refuse(reply, f"it has more than {most >> 20} MiB")
        if self._holds_others(id, content):
            return self._refuse(reply, "one of its parts contains other parts than announced")
        return _store_object(self._state, run, self._session, private(self._node, id), content)

    def _holds_others(self, id: str, content: bytes) -> bool:
        """Return whether a part contains other parts than announced."""
        named = content.partition(DIVIDER)[0].split(b" ")[1].decode("ascii")
        within = {private(self._node, part) for part in named.split(",") if part}
        parent = {"id": private(self._node, id)}
        rows = self._state.query("SELECT child_id FROM object_children WHERE parent_id = :id", parent)
        return within != {row["child_id"] for row in rows}

    def _refuse(self, reply: Announced, why: str) -> bool:
        """Delete a reply, send the run the reason if it has not fetched the reply yet, and return False."""
        metadata = self._order_of(reply)
        self._drop(reply)
        if metadata is not None:
            self._session = self._state.start_session(reply.run)
            self._fail(metadata, why)
        return False

    def _own(self, about: Metadata) -> Metadata | None:
        """Return a reply's metadata, taken from its order, or None if this is not the node's reply to an order."""
        if about.src_node_id != self._node or about.dst_node_id != SUPERLINK_NODE_ID or not about.reply_to_message_id:
            return None
        order = self._state.get_valid_message_ins(about.reply_to_message_id)
        if order is None or int64_to_uint64(order["dst_node_id"]) != self._node:
            return None
        if int64_to_uint64(order["run_id"]) != about.run_id:
            return None
        came = now().timestamp()
        return Metadata(
            about.run_id, private(self._node, about.message_id), self._node, SUPERLINK_NODE_ID, about.reply_to_message_id,
            order["group_id"], came, order["created_at"] + order["ttl"] - came, order["message_type"],
        )  # fmt: skip

    def _order_of(self, reply: Announced) -> Metadata | None:
        """Return the metadata of an announced reply, or None if the run has fetched it."""
        rows = self._state.query(
            "SELECT reply_to_message_id FROM message_res WHERE message_id = :root", {"root": reply.root}
        )
        if not rows:
            return None
        order = rows[0]["reply_to_message_id"]
        return self._own(Metadata(reply.run, reply.root, reply.node, SUPERLINK_NODE_ID, order, "", 0.0, 0.0, "train"))

    def _drop(self, reply: Announced) -> None:
        """Delete a reply and all its parts."""
        self._book.forget(reply)
        self._incoming.forget(reply.session)
        with self._state.session():
            self._state._cleanup_push_session(reply.session, cleanup_messages=False)
            self._state.object_store.delete(reply.root)
            self._state._on_push_session_expired({reply.root})

    def _fail(self, metadata: Metadata, why: str) -> bool:
        """Store an error with the reason of a refusal for the run, and return whether it was stored."""
        log.warning("node %s: its reply is refused: %s", self._node, why)
        reason = f"its reply is refused: {why}"
        failed = make_message(metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason[:MOST_REASON]))
        id = failed.object_id
        failed.metadata.__dict__["_message_id"] = id
        stored, _ = _store(self._state, failed, get_object_tree(failed), self._session)
        if not stored:
            self._close()
        stored = stored and _store_object(self._state, metadata.run_id, self._session, id, failed.deflate())
        if stored:
            self._incoming.announced(self._session, REPLY, [])
        return stored

    def _close(self) -> None:
        """Close the session."""
        self._incoming.forget(self._session)
        self._state._cleanup_push_session(self._session, cleanup_messages=False)


def private(node: int, id: str) -> str:
    """Return the id under which a node's part of a message is stored: different for each node, and secret."""
    return hmac.digest(SALT, f"{node} {id}".encode(), "sha256").hex()


def _private_tree(node: int, tree: ObjectTree) -> ObjectTree:
    return ObjectTree(
        object_id=private(node, tree.object_id), children=[_private_tree(node, child) for child in tree.children]
    )


def _is_part(id: str, content: bytes) -> bool:
    """Return whether the content is a valid part with this hash."""
    try:
        validate_object_content(content)
    except (ValueError, UnexpectedObjectContentError):
        return False
    return get_object_id(content) == id


def _held(state: SqlLinkState, ids: set[str]) -> int:
    """Return the bytes of the stored parts."""
    return sum(len(state.object_store.get(id) or b"") for id in ids)


def _anew(message: Message, metadata: Metadata) -> Message:
    """Return a reply to store: with this metadata, and its error or no content."""
    if not message.has_error():
        return make_message(metadata, content=RecordDict())
    reason = str(message.error.reason or "")[:MOST_REASON]
    return make_message(metadata, error=Error(message.error.code, reason))
