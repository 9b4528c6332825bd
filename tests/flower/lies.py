"""Hostile answers to an order to train, drawn by hypothesis: what a reply may hold instead of a contribution, or be."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import strategies as st

from fedloom.clients.protocol.bundles import BUNDLE, LENGTH, bundled_reply
from fedloom.clients.protocol.messages import LOST, MEAN, METRICS, OWN, ROUND, SITE, UNKNOWN
from tests.flower.speaker import Node, bare, part

Lie = Callable[[Node, Message], Any]  # what a node does with an order
Change = Callable[[RecordDict], Any]
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
DTYPES = ("float16", "float32", "float64", "int8", "int64", "uint64", "bool", "complex64", "<U3", "datetime64[s]")
NAMES = st.one_of(st.sampled_from([SITE, ROUND, METRICS, LOST, UNKNOWN, OWN, "partial", "expected", "configuration"]),
                  st.text(max_size=20))  # fmt: skip
RECORDS = st.sampled_from([SITE, ROUND])
MANY = [str(number) for number in range(3000)]


def true(asked: Message) -> RecordDict:
    """A reply that would count: the site sends back what it was sent."""
    mean = asked.content.array_records[MEAN]
    parts = {record: {name: mean[name] for name in mean if name.startswith(kind)} for record, kind in KINDS.items()}
    content = RecordDict({record: ArrayRecord(arrays) for record, arrays in parts.items()})
    content[METRICS] = MetricRecord({"loss": 1.0, "samples": 20})
    return content


KINDS = {SITE: "extractor.", ROUND: "head."}


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """An array of some kind and shape that holds one number, in other bytes than it says now and then."""
    with np.errstate(all="ignore"):
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        kind, number = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0.0, 1.0, -1.0, 1e9, 1e30, np.nan, np.inf]))
        plain = Array(np.full(shape, number).astype(kind))
    if not draw(st.booleans()):
        return plain
    dtype = draw(st.sampled_from([kind, "float32", "object", "O", "", "V8"]) | st.text(max_size=8))
    sizes = draw(st.lists(st.sampled_from([-1, 0, 1, 8, 10**6, 10**12, 2**62]), max_size=40))
    cut = draw(st.integers(0, len(plain.data)))
    data = draw(st.sampled_from([plain.data, plain.data[:cut], plain.data[:cut] + b"PK\x03\x04", b"\x93NUMPY" + bytes(cut)]))
    return Array(dtype, tuple(sizes), draw(st.sampled_from(["numpy.ndarray", "int16", "bf16", "pickle"])), data)


@st.composite
def records(draw: st.DrawFn) -> Any:
    """A record of any kind."""
    kind = draw(st.sampled_from(["arrays", "metrics", "words"]))
    if kind == "arrays":
        return ArrayRecord(draw(st.dictionaries(st.text(max_size=8), arrays(), max_size=2)))
    if kind == "metrics":
        numbers = st.one_of(FLOATS, INTEGERS, st.lists(FLOATS, max_size=3), st.lists(INTEGERS, max_size=3))
        return MetricRecord(draw(st.dictionaries(NAMES | st.sampled_from(["loss", "samples"]), numbers, max_size=3)))
    words = st.one_of(st.text(max_size=40), st.binary(max_size=40), FLOATS, INTEGERS, st.booleans())
    return ConfigRecord(draw(st.dictionaries(NAMES | st.sampled_from(["round", "digest"]), words, max_size=3)))


def _without(record: str) -> Change:
    return lambda content: content.pop(record, None)


def _with(name: str, record: Any) -> Change:
    return lambda content: content.__setitem__(name, record)


def _tensor(record: str, place: int, array: Array) -> Change:
    def change(content: RecordDict) -> None:
        if isinstance(content.get(record), ArrayRecord) and content[record]:
            there = dict(content.array_records[record])
            content[record] = ArrayRecord({**there, list(there)[place % len(there)]: array})

    return change


def _named(record: str, names: list[str]) -> Change:
    """One tensor under further names."""

    def change(content: RecordDict) -> None:
        if isinstance(content.get(record), ArrayRecord) and content[record]:
            there = dict(content.array_records[record])
            content[record] = ArrayRecord({**there, **dict.fromkeys(names, next(iter(there.values())))})

    return change


def _numbers(loss: Any, samples: Any) -> Change:
    return _with(METRICS, MetricRecord({"loss": loss, "samples": samples}))


CHANGES = st.one_of(
    st.builds(_without, st.sampled_from([SITE, ROUND, METRICS])),
    st.builds(_with, NAMES, records()),
    st.builds(_tensor, RECORDS, st.integers(0, 20), arrays()),
    st.builds(_tensor, RECORDS, st.integers(0, 20), arrays()),
    st.builds(_named, RECORDS, st.lists(st.text(max_size=200), min_size=1, max_size=3) | st.just(MANY)),
    st.builds(_numbers, FLOATS | INTEGERS, INTEGERS | FLOATS | st.lists(INTEGERS, max_size=2)),
)


def _changed(changes: list[Change], bundled: bool) -> Lie:
    def do(node: Node, asked: Message) -> None:
        content = true(asked)
        for change in changes:
            change(content)
        node.send(Message(bundled_reply(content) if bundled else content, reply_to=asked))

    return do


def _bundle(data: bytes) -> Lie:
    """A reply with a bundle of these bytes."""

    def do(node: Node, asked: Message) -> None:
        content = true(asked)
        whole = ConfigRecord({BUNDLE: data}), ArrayRecord({BUNDLE: Array("uint8", (len(data),), BUNDLE, data)})
        content[BUNDLE] = whole[len(data) % 2]
        node.send(Message(content, reply_to=asked))

    return do


def _error(code: int, reason: str) -> Lie:
    return lambda node, asked: node.send(Message(Error(code, reason), reply_to=asked))


def _raw(kind: str, body: bytes) -> Lie:
    def do(node: Node, asked: Message) -> None:
        reply = Message(RecordDict(), reply_to=asked)
        node.push(reply, *bare(reply, part(kind, [], body)))

    return do


OBJECTS = ("RecordDict", "ArrayRecord", "Array", "ArrayChunk", "ConfigRecord", "MetricRecord", "Message")
BODIES = st.one_of(st.binary(max_size=60), st.sampled_from([b"{}", b"[]", b"null", b'{"a":1}', b'{"arraychunk_ids":[5]}',
                                                           b"[" * 5000, b"1e999", b'{"site":"x"}']))  # fmt: skip


def lies() -> st.SearchStrategy[Lie]:
    """Mostly replies that are changed; errors with any text, and objects of any bytes."""
    changed = st.builds(_changed, st.lists(CHANGES, min_size=1, max_size=3), st.booleans())
    errors = st.builds(_error, st.integers(0, 300), st.text(max_size=300))
    indices = st.sampled_from([b"[]", b"[[],[]]", b"{}", b'[[["site","w","float32",[1],"x",8]],[]]', b"[" * 5000])
    heads = st.builds(lambda index, size: LENGTH.pack(size or len(index)) + index, indices, st.sampled_from([0, 7, 2**63]))
    bundles = st.builds(lambda head, data: _bundle(head + data), heads | st.binary(max_size=9), st.binary(max_size=9))
    return st.one_of(changed, changed, changed, errors, bundles, st.builds(_raw, st.sampled_from(OBJECTS), BODIES))
