"""A run's place at a SuperLink that fails: it is asked again for a while, and then the run ends with one line."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.message_pb2 import Message as Told
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.run import Run

from fedloom.conf.errors import UserError
from fedloom.server.flower.grid import CarefulGrid, Patient

ANSWERS = {"/v1/runtime/pull-messages": PullAppMessagesResponse()}


class SuperLink:
    """What answers a grid. `answer`: an answer's status, body and heads, to a path."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.answer: Callable[[str], tuple[int, bytes, dict[str, str]]] = lambda path: (200, b"", {})

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.path, request.content))
        status, body, heads = self.answer(request.url.path)
        return httpx.Response(status, content=body, headers=heads)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SuperLink, CarefulGrid]]:
    monkeypatch.setattr(Patient, "wait_seconds", 0.05)
    monkeypatch.setattr(Patient, "pause_seconds", 0.01)
    link = SuperLink()
    grid = CarefulGrid("127.0.0.1:9", True, None, "token")
    grid.set_run(Run.create_empty(3))
    client = grid._runtime_client
    client._client._transport = httpx.MockTransport(link)
    yield link, grid
    client.close()


@pytest.mark.parametrize("status", [300, 307, 400, 404, 409, 413, 429, 500, 501, 599])
def test_whatever_a_superlink_answers_is_one_line(link: Any, status: int):
    there, grid = link
    there.answer = lambda path: (status, b"Internal Server Error", {"location": "https://elsewhere"})
    for ask in (lambda: list(grid.get_nodes()), lambda: grid.pull_messages(["a"]), lambda: grid.pull_messages(["b"])):
        with pytest.raises(UserError, match="the SuperLink at") as caught:
            ask()
        assert len(str(caught.value).splitlines()) == 1 and caught.value.__suppress_context__
    assert {path for path, _ in there.asked} == {"/v1/runtime/get-nodes", "/v1/runtime/pull-messages"}
    assert (len(there.asked) > 5) == (status >= 500)


def test_a_run_that_was_stopped_is_one_line(link: Any):
    there, grid = link
    there.answer = lambda path: (403, b"", {})
    with pytest.raises(UserError, match="has ended this run"):
        grid.get_nodes()


def test_a_superlink_that_comes_back_is_asked_again(link: Any):
    there, grid = link
    there.answer = lambda path: (500 if len(there.asked) % 3 else 200, b"", {})
    for _ in range(5):
        assert list(grid.get_nodes()) == []
    assert len(there.asked) == 15


def test_what_is_refused_or_not_wanted_any_more_is_deleted_at_the_superlink(link: Any):
    there, grid = link
    reply, tree = Told(), ObjectTree(object_id="r")
    reply.metadata.message_id, reply.metadata.reply_to_message_id, reply.metadata.run_id = "r", "a", 3
    reply.metadata.message_type = "train"
    whole = PullAppMessagesResponse(messages_list=[reply], message_object_trees=[tree]).SerializeToString()
    there.answer = lambda path: (200, whole if path.endswith("pull-messages") else b"", {})
    (message,) = grid.pull_messages(["a"])  # a part of it is not found
    assert message.has_error() and "a part of it is gone" in message.error.reason
    assert [path for path, _ in there.asked].count("/v1/runtime/confirm-message-received") == 1
    there.asked.clear()
    there.answer = lambda path: (200, whole if path.endswith("pull-messages") else b"\x08\x01", {})
    assert grid.pull_messages(["a"]) == []  # it is still coming
    grid.cancel(["a", "b"])
    (body,) = [body for path, body in there.asked if path.endswith("confirm-message-received")]
    assert ConfirmMessageReceivedRequest.FromString(body).message_object_id == "r"
    there.asked.clear()
    grid.cancel(["a"])
    assert not there.asked
