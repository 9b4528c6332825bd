"""Bundles: all arrays of a record, or of a reply, in one array while they travel."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from hypothesis import given
from hypothesis import strategies as st

from fedloom.clients.protocol import bundles
from fedloom.clients.protocol.bundles import (
    BUNDLE,
    BUNDLED,
    LENGTH,
    bundled_orders,
    bundled_reply,
    may_bundle,
    unbundled,
)
from fedloom.clients.protocol.messages import ORDER, to_arrays, to_states
from fedloom.server.flower.unfolding import check_unfolding
from fedloom.sims.federation.node_app import carried

ARRAYS = st.builds(
    Array,
    st.sampled_from(["float32", "int64", "uint8"]),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(["numpy.ndarray", "bf16", ""]),
    st.binary(max_size=40),
)
RECORDS = st.dictionaries(st.text(max_size=5), st.dictionaries(st.text(max_size=5), ARRAYS, max_size=3), max_size=3)


def content_of(records: dict[str, dict[str, Array]]) -> RecordDict:
    return RecordDict({name: ArrayRecord(arrays) for name, arrays in records.items()})


def message_of(content: RecordDict) -> Message:
    return make_message(Metadata(1, "id", 0, 1, "", "", 0.0, 60.0, "train"), content=content)


def plain(content: RecordDict) -> dict[str, Any]:
    """All that is in a message's arrays, in order."""
    return {
        record: [(name, array.dtype, tuple(array.shape), array.stype, bytes(array.data)) for name, array in arrays.items()]
        for record, arrays in content.array_records.items()
    }


@given(RECORDS, st.sampled_from([0, bundles.MOST_WHOLE]))
def test_what_is_bundled_comes_out_as_it_was(records: dict[str, dict[str, Array]], most: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "MOST_WHOLE", most)
        comes_out_as_it_was(content_of(records))


def comes_out_as_it_was(content: RecordDict) -> None:
    assert plain(unbundled(bundled_reply(content))) == plain(content)
    order = message_of(RecordDict(dict(content)))
    order.content[ORDER] = ConfigRecord({"json": "{}"})
    (sent,) = bundled_orders([order])
    assert may_bundle(sent.content) and not may_bundle(order.content)
    assert plain(unbundled(sent.content)) == plain(content)
    assert sent.content.config_records[ORDER]["json"] == "{}"


def test_the_config_records_of_a_message_have_a_bound_together():
    """A node refuses a message with more than 16 MiB in addition to the data of arrays."""
    record = to_arrays({"a": full(50_000)})  # 400 kB
    few, many = (RecordDict({f"model/{number}": record for number in range(count)}) for count in (2, 60))
    small, large = bundled_orders([message_of(few), message_of(many)])
    assert [len(sent.content.config_records) for sent in (small, large)] == [2, 0]
    parts = {id: part.deflate() for id, part in get_all_nested_objects(large).items()}
    check_unfolding(large.object_id, parts, 2**26)
    assert plain(unbundled(large.content)) == plain(many) and plain(unbundled(small.content)) == plain(few)


@pytest.mark.parametrize(("most", "parts"), [(bundles.MOST_WHOLE, 4), (0, 6)])
def test_a_bundle_holds_the_same_states(most: int, parts: int, monkeypatch: pytest.MonkeyPatch):
    """Small ones in one part of a message, larger ones in three."""
    monkeypatch.setattr(bundles, "MOST_WHOLE", most)
    state = {f"layer{number}.weight": full(number) for number in range(60)}
    content = RecordDict({"site": to_arrays(state), "metrics": MetricRecord({"loss": 1.0})})
    reply = bundled_reply(content)
    found = to_states(unbundled(reply))["site"]
    assert all(np.array_equal(found[name].numpy(), tensor.numpy()) for name, tensor in state.items())
    assert reply.metric_records["metrics"]["loss"] == 1.0
    assert len(get_all_nested_objects(message_of(content))) > 120
    assert len(get_all_nested_objects(message_of(reply))) == parts


def full(number: int) -> torch.Tensor:
    return torch.full((2, number), float(number))


def test_nothing_is_logged_for_a_bundle(caplog: pytest.LogCaptureFixture):
    """Flower warns when a record gets another type."""
    order = RecordDict({"mean": to_arrays({"a": full(2)}), ORDER: ConfigRecord({"json": "{}"})})
    bundled_orders([message_of(order)])
    bundled_reply(order)
    assert not caplog.records


def test_what_several_sites_get_is_bundled_once():
    common, own = to_arrays({"a": full(2)}), [to_arrays({"a": full(number)}) for number in (3, 4)]
    messages = [message_of(RecordDict({"mean": common, "subset": one})) for one in own]
    first, second = (message.content for message in bundled_orders(messages))
    assert first["mean"] is second["mean"] and first["subset"] is not second["subset"]


def test_one_record_under_two_names_keeps_both():
    """The server sends a state that several parts of an order need as one record."""
    one = to_arrays({"a": full(2)})
    orders = [message_of(RecordDict({"mean": one, "model/0": one})), message_of(RecordDict({"star": one}))]
    found = [plain(unbundled(message.content)) for message in bundled_orders(orders)]
    assert found == [plain(order.content) for order in orders]


def bundle(head: bytes, data: bytes = b"", length: int | None = None, small: bool = False) -> RecordDict:
    whole = LENGTH.pack(len(head) if length is None else length) + head + data
    return RecordDict({BUNDLE: KINDS[small](whole)})


KINDS = {True: lambda data: ConfigRecord({BUNDLE: data}),
         False: lambda data: ArrayRecord({BUNDLE: Array("uint8", (len(data),), BUNDLE, data)})}  # fmt: skip


def entry(
    record: Any = "r", name: Any = "n", dtype: Any = "float32", shape: Any = (1,), stype: Any = "x", size: Any = 4
) -> list[Any]:
    return [record, name, dtype, list(shape) if isinstance(shape, tuple) else shape, stype, size]


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"[",
        b"[[" * 100_000,
        b"null",
        b"[[]]",
        b"{}",
        b"[[[]],[]]",
        *(
            json.dumps([entries, []]).encode()
            for entries in (
                [entry(size=5)],
                [entry(size=3)],
                [entry(size=-1)],
                [entry(size=True)],
                [entry(size=4.0)],
                [entry(size=2**70)],
                [entry(record=[])],
                [entry(name=None)],
                [entry(dtype=7)],
                [entry(shape=None)],
                [entry(shape="a")],
                [entry(stype=BUNDLE)],
                [entry(size=2), entry(size=2)],
                [entry(size=2)],
            )
        ),
        json.dumps([[entry()], [{}]]).encode(),
    ],
)
@pytest.mark.parametrize("small", [True, False])
def test_a_malformed_bundle_is_refused(head: bytes, small: bool):
    with pytest.raises((ValueError, TypeError, RecursionError)):
        unbundled(bundle(head, b"abcd", small=small))


@pytest.mark.parametrize("record", [{BUNDLE: "text"}, {BUNDLE: [b"a"]}, {BUNDLE: b"", "more": 1}, {"other": b""}])
def test_a_config_record_that_is_not_a_bundle_stays(record: dict[str, Any]):
    content = RecordDict({"own": ConfigRecord(record)})
    assert unbundled(content).config_records["own"] == record


def test_an_index_has_a_bound_in_all_bundles_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundles, "MOST_INDEX", 100)
    head = json.dumps([[entry()], []]).encode()
    assert unbundled(bundle(head, b"abcd")).array_records.keys() == {"r"}
    one = bundle(head, b"abcd")[BUNDLE]
    with pytest.raises(ValueError, match="index is too long"):
        unbundled(RecordDict({str(number): one for number in range(4)}))
    with pytest.raises(ValueError, match="index is too long"):
        unbundled(bundle(b"", length=2**63))
    monkeypatch.setattr(bundles, "MOST_ENTRIES", 1)
    for index in ([[entry(), entry(name="m")], []], [[entry()], ["empty"]]):
        with pytest.raises(ValueError, match="more than 1 arrays"):
            unbundled(bundle(json.dumps(index).encode(), b"abcdabcd"))


def test_a_record_that_comes_in_two_bundles_is_refused():
    content = bundled_reply(content_of({"site": {}}))
    content["site"] = MetricRecord({"loss": 1.0})
    with pytest.raises(ValueError, match="a record comes twice"):
        unbundled(content)


def context() -> Context:
    return Context(1, 1, {}, RecordDict(), {})


def test_the_site_answers_as_it_was_asked():
    """In a bundle if the order says so; as it is, otherwise; and a malformed bundle with one line."""
    seen: list[dict[str, Any]] = []

    def echo(message: Message, _: Context) -> Message:
        seen.append(plain(message.content))
        return Message(RecordDict(dict(message.content.array_records)), reply_to=message)

    content = content_of({"mean": {"a": Array("uint8", (2,), "x", b"ab")}})
    content[ORDER] = ConfigRecord({"json": "{}"})
    order = message_of(content)
    (sent,) = bundled_orders([order])
    assert plain(carried(echo)(order, context()).content) == plain(content)
    reply = carried(echo)(sent, context())
    assert list(reply.content) == [BUNDLE] and plain(unbundled(reply.content)) == plain(content)
    assert seen == [plain(content)] * 2
    sent.content["mean"] = bundle(b"[[" * 1000)[BUNDLE]
    assert "order" in str(carried(echo)(sent, context()).error.reason)
    error = make_message(order.metadata, error=Error(1, "no"))
    assert carried(lambda message, _: message)(error, context()) is error
    assert len(seen) == 2 and sent.content.config_records[ORDER][BUNDLED] is True
