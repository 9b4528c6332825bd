"""What takes many times its bytes when it is read is not read."""

import json
from typing import Any

import pytest
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto

from fedloom.server.flower.grid import MOST_REASON, received
from fedloom.server.flower.unfolding import MOST_RECORDS
from tests.flower.speaker import part

LARGE = MOST_RECORDS + 1
ABOUT = Metadata(1, "", 5, 1, "a", "1", 0.0, 60.0, "train")
Part = tuple[str, bytes]


def of(message: Message, root: Part, *parts: Part) -> Message:
    """What the server reads of these parts."""
    message.metadata.__dict__["_message_id"] = root[0]
    bare = remove_content_from_message(message) if message.has_content() else message
    return received(message_to_proto(bare), dict([root, *parts]), 2**28)


def records(*parts: Part) -> Message:
    """What the server reads of a message whose content is the last of these parts."""
    message = make_message(ABOUT, content=RecordDict())
    return of(message, part("Message", [parts[-1][0]], message.deflate().partition(b"\x00")[2]), *parts)


def small_things(kind: str) -> list[Part]:
    """Parts of a message, one of which is full of small things."""
    many = b"[],[],[]" + b" " * LARGE
    if kind == "RecordDict":
        return [part(kind, [], b'{"x":[' + many + b"]}")]
    if kind == "Array":
        array = part(kind, [], b'{"dtype":"f4","shape":[1],"stype":"numpy.ndarray","arraychunk_ids":[' + many + b"]}")
        return [array, part("ArrayRecord", [array[0]], json.dumps({"w": array[0]}).encode())]
    record = part(kind, [], b"\x0a\x00" * (LARGE // 2))
    return [record, part("RecordDict", [record[0]], json.dumps({"x": record[0]}).encode())]


@pytest.mark.parametrize("kind", ["RecordDict", "Array", "ConfigRecord", "MetricRecord"])
def test_small_things_are_few(kind: str, monkeypatch: pytest.MonkeyPatch):
    def loads(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is read")

    monkeypatch.setattr("fedloom.server.flower.unfolding.json.loads", loads)
    message = records(*small_things(kind))
    assert message.has_error() and "16 MiB in addition to the data of arrays" in str(message.error.reason)


def test_an_error_is_cut():
    message = make_message(ABOUT, error=Error(3, "x" * 10**6))
    message = of(message, part("Message", [], message.deflate().partition(b"\x00")[2]))
    assert message.error.code == 3 and message.error.reason == "x" * MOST_REASON
