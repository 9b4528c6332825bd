"""Parts of messages go by their hashes: a member that knows what others send, or will send, does not get in their way."""

import importlib
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree

from fedloom.server.flower.unfolding import read_by_hash
from tests.sims.links import Link, leaf, speaking

KINDS = ("ArrayRecord", "Array", "ArrayChunk")


def network() -> ArrayRecord:
    """What everybody knows: the network that the seed draws, or the mean that was sent before."""
    return ArrayRecord({"w": Array(np.arange(1000.0))})


def known(kind: str) -> ObjectTree:
    """A part of it, as if it had another part in it."""
    (id,) = [id for id, part in get_all_nested_objects(network()).items() if type(part).__name__ == kind]
    return ObjectTree(object_id=id, children=[leaf("none of it")])


def lie(link: Link, kind: str) -> str:
    """Announce that as a part of a reply, and send nothing; the order that it answers."""
    node = link.nodes[1]
    asked = link.order(node)
    reply = link.reply(node, asked)
    tree = get_object_tree(reply)
    tree.children[0].children.append(known(kind))
    assert link.send(node, reply, tree)[1]
    return asked


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_is_sent_whatever_a_node_has_said_of_its_parts(link: Link, kind: str):
    lie(link, kind)
    order = link.order(link.nodes[0], RecordDict({"w": network(), "o": ConfigRecord({"n": 1})}))
    assert leaf("none of it").object_id not in str(link.state.object_store.get_object_tree(order))
    assert link.whole(link.nodes[0], link.reply(link.nodes[0], order))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [True, False], ids=["before", "while it is sent"])
def test_a_reply_is_taken_whatever_another_node_says_of_its_parts(link: Link, kind: str, before: bool):
    honest = link.nodes[0]
    order = link.order(honest)
    reply = link.reply(honest, order)
    reply.content["w"] = network()
    reply.metadata.__dict__["_message_id"] = reply.object_id
    if before:
        lie(link, kind)
    taken, missing, session = link.send(honest, reply)
    if not before:
        lie(link, kind)
    with speaking(honest):
        parts = get_all_nested_objects(reply)
        assert taken and all(link.state.store_object(link.run, session, id, parts[id].deflate()) for id in missing)
    message = link.received(order)
    assert message is not None and message.has_content()
    tree = link.state.object_store.get_object_tree(message.metadata.message_id)
    there = {part.object_id: link.state.object_store.get(part.object_id) for part in iterate_object_tree(tree)}
    assert {*there.values()} == {part.deflate() for part in parts.values()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [True, False], ids=["sent", "on its way"])
def test_what_an_order_holds_no_one_says_otherwise(link: Link, kind: str, whole: bool):
    orders = _announce(link, {link.nodes[0]: RecordDict({"w": network()})})
    if whole:
        assert _push(link, *orders)
    lie(link, kind)
    assert whole or _push(link, *orders)
    assert link.state.object_store.get_object_tree(orders[1][0].object_id) == get_object_tree(orders[1][0])


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_reply_is_not_the_order_that_its_node_has_received(link: Link, confirmed: bool):
    """Flower ends the session under which the orders of a round are sent when one of them is announced again."""
    honest, node = link.nodes
    orders = _announce(link, {node: RecordDict({"o": ConfigRecord({"n": 1})}), honest: RecordDict({"w": network()})})
    mine = orders[1][0]
    if confirmed:
        link.state.object_store.delete(mine.object_id)
    reply = link.reply(node, mine.object_id)
    reply.metadata.__dict__["_message_id"] = mine.object_id
    link.send(node, reply, get_object_tree(mine))
    assert _push(link, orders[0], orders[1][confirmed:])


def test_no_one_fetches_or_deletes_a_part_of_anothers_reply_by_its_hash(link: Link):
    honest = link.nodes[0]
    reply = link.reply(honest, link.order(honest))
    assert link.whole(honest, reply)
    for id in get_all_nested_objects(reply):
        assert link.state.object_store.get(id) is None


def test_flowers_own_grid_reads_parts_that_are_kept_by_other_ids(link: Link, monkeypatch: pytest.MonkeyPatch):
    """An app of others may run, too (`apps: any`)."""
    place: Any = importlib.import_module("flwr.superlink.grid.http_grid")
    monkeypatch.setattr(place, "inflate_object_from_contents", place.inflate_object_from_contents)
    read_by_hash()
    node = link.nodes[0]
    asked = link.order(node)
    reply = link.reply(node, asked)
    reply.content["w"] = network()
    reply.metadata.__dict__["_message_id"] = reply.object_id
    assert link.whole(node, reply)
    received = link.received(asked)
    assert received is not None
    tree = link.state.object_store.get_object_tree(received.metadata.message_id)
    parts = {part.object_id: link.state.object_store.get(part.object_id) or b"" for part in iterate_object_tree(tree)}
    read = place.inflate_object_from_contents(received.metadata.message_id, parts)
    assert read.content == reply.content


def _announce(link: Link, contents: dict[int, RecordDict]) -> tuple[str, list[Message]]:
    """Orders to nodes, all under one session, as a run announces them."""
    session, messages = link.state.start_session(link.run), []
    for node, content in contents.items():
        metadata = Metadata(link.run, "", SUPERLINK_NODE_ID, node, "", "1", now().timestamp(), 600.0, "train")
        message = make_message(metadata, content=content)
        message.metadata.__dict__["_message_id"] = message.object_id
        assert link.state.store_message_and_object_tree(message, get_object_tree(message), session)[0]
        messages.append(message)
    return session, messages


def _push(link: Link, session: str, messages: list[Message]) -> bool:
    """Whether all of their parts are stored."""
    parts = {id: part for message in messages for id, part in get_all_nested_objects(message).items()}
    return all(link.state.store_object(link.run, session, id, part.deflate()) for id, part in parts.items())
