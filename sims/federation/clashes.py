"""Parts of messages that somebody announced with others in them than they have. They go by hashes, which others may know.

Flower (1.41) believes whoever names a part first, and refuses all that come later, orders of runs among them.
"""

from collections.abc import Iterable

from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

WITHIN = "SELECT child_id FROM object_children WHERE parent_id = :id"
ABOVE = """WITH RECURSIVE above(id) AS
    (SELECT :id UNION SELECT parent_id FROM object_children JOIN above ON child_id = above.id)
    SELECT id FROM above WHERE NOT EXISTS (SELECT 1 FROM object_children WHERE child_id = above.id)"""
NAMED = """SELECT 1 FROM objects WHERE object_id = :id UNION SELECT 1 FROM message_ins WHERE message_id = :id
    UNION SELECT 1 FROM message_res WHERE message_id = :id
    UNION SELECT 1 FROM object_push_session_roots WHERE root_object_id = :id"""


def within(state: SqlLinkState, id: str) -> set[str]:
    """The parts that a part was announced with."""
    return {row["child_id"] for row in state.query(WITHIN, {"id": id})}


def named(state: SqlLinkState, id: str) -> bool:
    """Whether there is a message or a part of that id, or was one whose sending has not ended."""
    return bool(state.query(NAMED, {"id": id}))


def clashes(state: SqlLinkState, tree: ObjectTree) -> set[str]:
    """The parts of a message that are known with others in them."""
    parts = {part.object_id: {child.object_id for child in part.children} for part in iterate_object_tree(tree)}
    return {id for id, own in parts.items() if id in state.object_store and within(state, id) != own}


def has_come(state: SqlLinkState, id: str) -> bool:
    """Whether the bytes of a part are there, which prove what is in it."""
    return bool(state.object_store.get(id))


def messages_of(state: SqlLinkState, ids: Iterable[str]) -> set[str]:
    """The messages, sent or announced, that hold any of these parts."""
    return {row["id"] for id in ids for row in state.query(ABOVE, {"id": id})}
