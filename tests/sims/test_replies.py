"""What a SuperLink takes of nodes, with its real database: a hostile reply is refused by name, and others' come as ever."""

import hashlib
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedloom.sims.federation import announced
from fedloom.sims.federation.announced import MOST_AGAIN, MOST_ALIVE
from fedloom.sims.federation.replies import LONGEST_RUNTIME, MOST_REASON
from tests.sims.links import Link, leaf, speaking


def refused(link: Link, asked: str, why: str) -> None:
    """The run hears of an order that its reply is refused, and the other node's comes as ever."""
    message = link.received(asked)
    assert message is not None and message.has_error() and why in str(message.error.reason)
    other = link.order(link.nodes[0])
    assert link.whole(link.nodes[0], link.reply(link.nodes[0], other))
    message = link.received(other)
    assert message is not None and message.has_content() and message.metadata.src_node_id == link.nodes[0]


def deep(parts: int) -> ObjectTree:
    tree = leaf("last")
    for number in range(parts):
        tree = ObjectTree(object_id=leaf(str(number)).object_id, children=[tree])
    return tree


TREES = {
    "many": ([leaf(str(number)) for number in range(3000)], "more than 2000 parts"),
    "many in many": ([ObjectTree(object_id=leaf(f"p{n}").object_id, children=[leaf(f"{n} {m}") for m in range(60)])
                      for n in range(60)], "more than 2000 parts"),
    "the same in many": ([ObjectTree(object_id=leaf(f"p{n}").object_id, children=[leaf(str(m)) for m in range(60)])
                          for n in range(60)], "more than 2000 parts"),
    "deep": ([deep(40)], "more than 8 levels"),
    "twice": ([leaf("a"), leaf("a")], "names a part twice"),
    "twice, differently": ([leaf("a"), ObjectTree(object_id=leaf("b").object_id, children=[
        ObjectTree(object_id=leaf("a").object_id, children=[leaf("c")])])], "names a part twice"),
    "no id": ([ObjectTree(object_id="")], "is not a hash"),
    "a long id": ([ObjectTree(object_id="a" * 10**6)], "is not a hash"),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_what_a_reply_announces_is_bounded(link: Link, name: str):
    (children, why), node = TREES[name], link.nodes[1]
    asked = link.order(node)
    reply = link.reply(node, asked)
    tree = ObjectTree(object_id=reply.object_id, children=children)
    assert link.send(node, reply, tree)[:2] == (True, [])
    assert len(link.state.object_store) < 20 and link.sessions() == 0
    refused(link, asked, why)


def test_another_messages_parts_are_refused(link: Link):
    node = link.nodes[1]
    asked = link.order(node)
    assert link.send(node, link.reply(node, asked), leaf("other"))[1] == []
    refused(link, asked, "another message's")


@pytest.mark.parametrize(
    "more", [{"created_at": float("nan")}, {"created_at": float("inf")}, {"created_at": -1.0}, {"ttl": float("nan")},
             {"ttl": float("inf")}, {"ttl": -5.0}, {"ttl": 1e300}, {"created_at": 1e300, "ttl": -1e300},
             {"message_type": "query.other"}, {"group_id": "g" * 10**6}]
)  # fmt: skip
def test_what_a_reply_says_of_itself_counts_for_nothing(link: Link, more: dict[str, Any]):
    node, other = reversed(link.nodes)
    asked, others = link.order(node), link.order(other)
    link.whole(other, link.reply(other, others))
    link.whole(node, link.reply(node, asked, **more))
    found = {
        message.metadata.src_node_id: message.metadata for message in link.state.get_message_res({asked, others}, link.run)
    }
    assert set(found) == {node, other}
    assert found[node].group_id == "1" and found[node].message_type == "train" and found[node].ttl <= 600
    assert abs(found[node].created_at - now().timestamp()) < 60


def test_an_error_of_a_node_is_cut(link: Link):
    node = link.nodes[1]
    asked = link.order(node)
    reply = make_message(link.reply(node, asked).metadata, error=Error(7, "x" * 10**6))
    reply.metadata.__dict__["_message_id"] = reply.object_id
    assert link.whole(node, reply)
    message = link.received(asked)
    assert message is not None and message.error.code == 7 and len(str(message.error.reason)) == MOST_REASON


def test_how_long_a_node_says_it_took_is_a_number(link: Link):
    def total() -> float:
        return link.state.query("SELECT clientapp_runtime AS n FROM run")[0]["n"]

    with speaking(link.nodes[1]):
        for runtime in (float("nan"), float("inf"), -float("inf"), -1.0, 2 * LONGEST_RUNTIME):
            link.state.add_clientapp_runtime(link.run, runtime)
        link.state.add_clientapp_runtime(link.run, 1.5)
    assert total() == 1.5


def test_a_node_sends_the_server_its_own_replies_and_no_one_anything_else(link: Link):
    """Flower's SuperLink passes on what a node sends to whom the message names."""
    honest, node = link.nodes
    asked, others = link.order(node), link.order(honest)
    for odd in (
        link.reply(node, ""), link.reply(node, asked, src_node_id=1), link.reply(node, asked, dst_node_id=honest),
        link.reply(node, asked, src_node_id=honest), link.reply(node, others), link.reply(node, asked, run_id=link.run + 1),
        link.reply(node, "0" * 64), link.reply(node, others, src_node_id=honest),
    ):  # fmt: skip
        assert link.send(node, odd)[:2] == (False, [])
    assert link.received(asked) is link.received(others) is None and link.sessions() == 0
    assert link.whole(node, link.reply(node, asked)) and link.whole(honest, link.reply(honest, others))


def test_parts_come_from_who_announced_them_and_no_more_than_a_run_takes(link: Link, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(announced, "LEAST_LIMIT", 5000)
    honest, node = link.nodes
    asked = link.order(node)
    reply = link.reply(node, asked)
    more = [b"ArrayChunk  2000\x00" + bytes([number]) * 2000 for number in range(9)]
    ids = [hashlib.sha256(content).hexdigest() for content in more]
    tree = get_object_tree(reply)
    tree.children.extend(ObjectTree(object_id=id) for id in ids)
    taken, missing, session = link.send(node, reply, tree)
    assert taken and set(ids) < set(missing)
    for speaker, under in ((honest, session), (node, ""), (node, "0"), (honest, "")):
        with speaking(speaker):
            assert not link.state.store_object(link.run, under, ids[0], more[0])
    with speaking(node):
        stored = [link.state.store_object(link.run, session, id, content) for id, content in zip(ids, more, strict=True)]
    assert stored == [True] * 2 + [False] * 7
    assert not any(link.state.object_store.get(id) for id in ids)
    refused(link, asked, "it has more than 0 MiB")


def test_a_part_holds_the_parts_that_it_was_announced_with(link: Link):
    """Whoever announces it truly would be refused later."""
    node = link.nodes[1]
    asked = link.order(node)
    reply = link.reply(node, asked)
    inner = get_object_tree(reply).children[0]
    parts = get_all_nested_objects(reply)
    tree = ObjectTree(object_id=reply.object_id, children=[ObjectTree(object_id=inner.object_id)])
    taken, missing, session = link.send(node, reply, tree)
    assert taken and inner.object_id in missing
    with speaking(node):
        assert not link.state.store_object(link.run, session, inner.object_id, parts[inner.object_id].deflate())
    refused(link, asked, "contains other parts than announced")


def test_a_runs_own_orders_say_how_large_replies_may_be(link: Link, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(announced, "LEAST_PARTS", 5)
    monkeypatch.setattr(announced, "LEAST_LIMIT", 1)
    node = link.nodes[1]
    for _ in range(3):  # three parts in an order, three in its reply, and about as many bytes
        asked = link.order(node)
        assert link.whole(node, link.reply(node, asked))
        message = link.received(asked)
        assert message is not None and message.has_content()


def test_an_order_whose_parts_another_run_has_sent_counts_as_well(link: Link, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(announced, "LEAST_LIMIT", 1)
    node = link.nodes[1]
    content = RecordDict({"o": ConfigRecord({"n": "x" * 5000})})
    link.order(node, content)
    link.run = link.state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
    asked = link.order(node, content)
    reply = link.reply(node, asked)
    reply.content["r"] = ConfigRecord({"n": "y" * 20_000})
    reply.metadata.__dict__["_message_id"] = reply.object_id
    assert link.whole(node, reply)


def test_so_many_replies_of_a_node_are_held(link: Link):
    node = link.nodes[1]
    asked = [link.order(node) for _ in range(MOST_ALIVE + 3)]
    for one in asked:
        assert link.whole(node, link.reply(node, one))
    assert [link.received(one) is None for one in asked] == [True] * 3 + [False] * MOST_ALIVE


def test_a_reply_is_announced_again_and_not_for_ever(link: Link):
    """The answer to it may have been lost."""
    node = link.nodes[1]
    asked = link.order(node)
    reply = link.reply(node, asked)
    for _ in range(MOST_AGAIN):
        taken, missing, _ = link.send(node, reply)
        assert taken and len(missing) == 3
    assert link.send(node, reply)[1] == []
    assert link.sessions() == 1
