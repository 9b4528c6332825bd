"""Parts of messages go by their hashes: a member that knows what others send, or will send, does not get in their way."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from tests.sims.links import Link, leaf

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


def blamed(link: Link, asked: str) -> bool:
    """Whether the run hears of an order that its reply is refused."""
    message = link.told(asked)
    return message is not None and message.has_error() and "others in it" in str(message.error.reason)


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_is_sent_whatever_a_node_has_said_of_its_parts(link: Link, kind: str):
    asked = lie(link, kind)
    order = link.order(link.nodes[0], RecordDict({"w": network(), "o": ConfigRecord({"n": 1})}))
    tree = link.state.object_store.get_object_tree(order)
    assert "none of it" not in str(tree) and leaf("none of it").object_id not in str(tree)
    assert blamed(link, asked)
    assert link.whole(link.nodes[0], link.reply(link.nodes[0], order))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_taken_whatever_another_node_has_said_of_its_parts(link: Link, kind: str):
    asked, honest = lie(link, kind), link.nodes[0]
    order = link.order(honest)
    reply = link.reply(honest, order)
    reply.content["w"] = network()
    reply.metadata.__dict__["_message_id"] = reply.object_id
    assert link.whole(honest, reply)
    message = link.told(order)
    assert message is not None and message.has_content()
    assert blamed(link, asked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [True, False], ids=["sent", "on its way"])
def test_what_an_order_holds_nobody_says_otherwise(link: Link, kind: str, whole: bool):
    honest, node = link.nodes
    asked = link.order(node)
    orders = _announce(link, {honest: RecordDict({"w": network()})})
    if whole:
        assert _push(link, *orders)
    reply = link.reply(node, asked)
    tree = get_object_tree(reply)
    tree.children[0].children.append(known(kind))
    assert link.send(node, reply, tree)[1] == []
    message = link.told(asked)
    assert message is not None and message.has_error()
    assert whole or _push(link, *orders)
    assert link.state.object_store.get_object_tree(orders[1][0].object_id) == get_object_tree(orders[1][0])


def test_a_reply_is_not_a_message_that_is_there_already(link: Link):
    """Flower ends the session under which the orders of a round are sent when one of them is announced again."""
    honest, node = link.nodes
    orders = _announce(link, {node: RecordDict({"o": ConfigRecord({"n": 1})}), honest: RecordDict({"w": network()})})
    mine = orders[1][0]
    reply = link.reply(node, mine.object_id)
    reply.metadata.__dict__["_message_id"] = mine.object_id
    assert link.send(node, reply, get_object_tree(mine))[1] == []
    assert _push(link, *orders)
    message = link.told(mine.object_id)
    assert message is not None and message.has_error() and "is there already" in str(message.error.reason)


def test_a_reply_is_not_a_part_of_another(link: Link):
    honest, node = link.nodes
    link.order(honest, RecordDict({"w": network()}))
    asked = link.order(node)
    reply = link.reply(node, asked)
    reply.metadata.__dict__["_message_id"] = network().object_id
    assert link.send(node, reply, get_object_tree(network()))[1] == []
    message = link.told(asked)
    assert message is not None and "is there already" in str(message.error.reason)


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


def test_a_reply_is_not_an_order_that_its_node_has_received(link: Link):
    """The session of the round's orders may still be open."""
    honest, node = link.nodes
    orders = _announce(link, {node: RecordDict({"o": ConfigRecord({"n": 1})}), honest: RecordDict({"w": network()})})
    mine = orders[1][0]
    link.state.object_store.delete(mine.object_id)  # the node has confirmed it
    reply = link.reply(node, mine.object_id)
    reply.metadata.__dict__["_message_id"] = mine.object_id
    assert link.send(node, reply, get_object_tree(mine))[1] == []
    assert _push(link, orders[0], orders[1][1:])
