"""What a server may answer a node: none of it makes a node hang, or takes its memory, or leads its requests elsewhere."""

import contextlib
import gzip
import importlib
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import Message as Told
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatFailure, HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate import NodeStateFactory

from fedloom.server.flower.http_answers import OddAnswerError
from fedloom.server.flower.unfolding import MOST_RECORDS
from fedloom.sims.federation.bodies import LARGEST_PART, SMALL
from fedloom.sims.federation.executor import Executor
from fedloom.sims.federation.heartbeats import keep_beating
from fedloom.sims.federation.orders import MOST_ORDER, REFUSED, _bounded, _without_apps, bound_orders
from tests.flower.machines import until
from tests.flower.server import GREETINGS, Answer, answering, node

pytestmark = pytest.mark.timeout(120)
END_SECONDS = 60
REQUESTS = {"PullObject": PullObjectRequest, "PullMessages": PullMessagesRequest, "GetRun": GetRunRequest,
            "SendNodeHeartbeat": SendNodeHeartbeatRequest}  # fmt: skip
ODD: dict[str, Answer] = {
    "500": (500, {}, b""),
    "junk": (200, {}, b"\xff\xff"),
    "no tree": (200, {}, PullMessagesResponse(messages_list=[Told()]).SerializeToString()),
}


@pytest.mark.parametrize("name", ODD)
def test_a_node_ends_when_its_server_answers_what_it_does_not_expect(tmp_path: Path, name: str):
    """So that what keeps it running starts it again."""

    def answers(path: str) -> Answer:
        return (200, {}, GREETINGS[path]) if path in GREETINGS else ODD[name]

    with answering(tmp_path, answers) as port, node(tmp_path, port) as child:
        try:
            assert child.wait(END_SECONDS) == 1, (tmp_path / "log.txt").read_text()
        finally:
            child.kill()


@pytest.mark.slow
def test_what_starts_apps_asks_again_after_a_failure_and_is_started_again(tmp_path: Path):
    asked: list[str] = []
    status = 500

    def answers(path: str) -> Answer:
        asked.append(path)
        return status, {}, b""

    with answering(tmp_path, answers) as port:
        executor = Executor(f"127.0.0.1:{port}", tmp_path / "ca.crt", "secret", "flwr-clientapp", "own")
        try:
            first = executor.child
            until(lambda: len(asked) > 1, "it does not ask again", END_SECONDS)
            status = 200
            until(lambda: len(asked) > 4, "it does not ask again", END_SECONDS)
            assert executor.child is first and first.poll() is None
            first.kill()
            first.wait()
            asked.clear()
            until(lambda: len(asked) > 1, "it is not started again", END_SECONDS)
        finally:
            executor.terminate()
        assert executor.child.wait(END_SECONDS) is not None and set(asked) == {"/v1/runtime/acquire-task"}


def test_a_heartbeat_is_sent_again_whatever_is_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(HeartbeatSender, "_heartbeat", HeartbeatSender._heartbeat)  # as it is, afterwards
    signals: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, kind: signals.append(kind))
    keep_beating()
    request = httpx.Request("POST", "https://a")

    def answered(error: Exception) -> HeartbeatSender:
        def beat() -> bool:
            raise error

        return HeartbeatSender(beat)

    def status(code: int) -> Exception:
        return httpx.HTTPStatusError("", request=request, response=httpx.Response(code, request=request))

    for error in (status(500), status(404), status(429), status(307), ValueError("Invalid protobuf"), OSError()):
        with pytest.raises(HeartbeatFailure):
            answered(error)._heartbeat()
    with pytest.raises(httpx.HTTPStatusError):
        answered(status(401))._heartbeat()
    assert not signals
    answered(RuntimeError("does not recognize this SuperNode"))._heartbeat()
    assert signals


class Followed:
    """A port of this machine that counts who comes."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(0.2)

    def nobody(self) -> bool:
        with self.listening, contextlib.suppress(TimeoutError):
            self.listening.accept()
            return False
        return True


def client(folder: Path, port: int, kind: type[Any] = FleetHttpClient) -> Any:
    """As Flower's node makes its own."""
    return kind.from_server_address(f"127.0.0.1:{port}", False, (folder / "ca.crt").read_bytes(), interceptors=[])


@pytest.fixture
def wary(monkeypatch: pytest.MonkeyPatch) -> None:
    place: Any = importlib.import_module("flwr.supernode.start_client_internal")
    for name in ("_pull_and_store_message", "get_fused_config_from_fab"):
        monkeypatch.setattr(place, name, getattr(place, name))  # as they are, afterwards
    monkeypatch.setattr(ProtobufClient, "__init__", ProtobufClient.__init__)
    bound_orders(0.0, own=True)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_no_request_goes_where_an_answer_sends_it(tmp_path: Path, wary: None, status: int):
    other = Followed()
    there = f"http://127.0.0.1:{other.listening.getsockname()[1]}/admin/\ndelete".replace("\n", "")
    with answering(tmp_path, lambda path: (status, {"location": there}, b"")) as port:
        for kind in (FleetHttpClient, RuntimeHttpClient):
            with (
                client(tmp_path, port, kind) as asked,
                pytest.raises(OddAnswerError, match=f"answers {status} and") as caught,
            ):
                asked.PullObject(PullObjectRequest())
            assert len(str(caught.value).splitlines()) == 1
    assert other.nobody()


def test_of_an_answer_so_many_bytes_are_read(tmp_path: Path, wary: None):
    bomb = gzip.compress(bytes(64 << 20))
    endless = {"transfer-encoding": "chunked"}
    cases = (
        ("PullObject", {"content-encoding": "gzip"}, bomb, "compressed"),
        ("PullMessages", {"content-encoding": "x, gzip"}, b"", "compressed"),
        ("PullMessages", {}, bytes(5 << 20), "more than 4194304 bytes"),
        ("SendNodeHeartbeat", {}, bytes(SMALL + 1), "more than 65536 bytes"),
        (
            "PullObject",
            endless,
            b"%x\r\n" % LARGEST_PART + bytes(LARGEST_PART) + b"\r\n1\r\n1\r\n0\r\n\r\n",
            "more than 67108864",
        ),
    )
    answers: list[Answer] = []
    with answering(tmp_path, lambda _: answers[-1]) as port, client(tmp_path, port) as asked:
        for path, heads, body, why in cases:
            answers.append((200, heads, body))
            with pytest.raises(OddAnswerError, match=why):
                getattr(asked, path)(REQUESTS[path]())


def test_an_answer_that_something_failed_is_only_cut(tmp_path: Path, wary: None):
    """Whatever is on the way may have made it."""
    for heads, body in (({}, bytes(5 << 20)), ({"content-encoding": "gzip"}, gzip.compress(bytes(64 << 20)))):
        home, failed = tmp_path / str(len(body)), (503, heads, body)
        with (
            answering(home, lambda _, failed=failed: failed) as port,
            client(home, port) as asked,
            pytest.raises(httpx.HTTPStatusError) as caught,
        ):
            asked.PullObject(PullObjectRequest())
        assert caught.value.response.status_code == 503 and len(caught.value.response.content) <= SMALL


def test_what_a_server_should_answer_is_read(tmp_path: Path, wary: None):
    part = PullObjectResponse(object_found=True, object_available=True, object_content=bytes(6 << 20))
    with answering(tmp_path, lambda _: (200, {}, part.SerializeToString())) as port, client(tmp_path, port) as asked:
        assert asked.PullObject(PullObjectRequest()) == part


def test_a_site_that_runs_its_own_app_unpacks_nothing_of_one_that_is_sent(wary: None):
    place: Any = importlib.import_module("flwr.supernode.start_client_internal")
    assert place.get_fused_config_from_fab(b"not a bundle", Run.create_empty(3)) == {}


def order(*, zeros: int = 0, text: int = 0) -> Message:
    """With arrays of different bytes, and with so many arrays that are alike, or so many letters."""
    content = RecordDict({"a": ArrayRecord([np.arange(float(n)) for n in (100, 2000, 3000)])})
    if zeros:
        content["z"] = ArrayRecord([np.zeros(10_000)] * zeros)
    if text:
        content["t"] = ConfigRecord({"t": "x" * text})
    made = make_message(Metadata(3, "", 1, 7, "", "1", time.time(), 600.0, "train"), content=content)
    made.metadata.__dict__["_message_id"] = made.object_id
    return made


class Asked:
    """A node's state, and its step that fetches an order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place: Any = importlib.import_module("flwr.supernode.start_client_internal")
        monkeypatch.setattr(self.place, "get_fused_config_from_fab", lambda *_: {})
        self.store = ObjectStoreFactory()
        self.state = NodeStateFactory(objectstore_factory=self.store).state()
        self.state.set_node_id(7)

    def pull(self, order: Message, most: int, without: bool = False, **more: Any) -> list[str | None]:
        """What is answered to an order at once."""
        parts = {id: part.deflate() for id, part in get_all_nested_objects(order).items()}
        confirmed: list[tuple[int, str]] = []
        bounded = _bounded(self.place._pull_and_store_message, self.place._insert_message, most)
        steps: dict[str, Any] = {"get_run": Run.create_empty, "get_fab": lambda *_: Fab("", b"", {})}
        run = (_without_apps(bounded) if without else bounded)(
            state=self.state, object_store=self.store.store(), node_config={},
            receive=lambda: (order, get_object_tree(order)), pull_object=lambda run, id: parts[id],
            confirm_message_received=lambda run, id: confirmed.append((run, id)), trusted_entities=None, **(steps | more),
        )  # fmt: skip
        assert run == 3 and confirmed == [(3, order.object_id)]
        return [reply.error.reason for reply in self.state.get_messages_legacy(is_reply=True)]


@pytest.mark.parametrize(("more", "most"), [({}, 10_000), ({"zeros": 100}, 500_000), ({"text": MOST_RECORDS}, MOST_ORDER)],
                         ids=["its bytes", "a part a hundred times", "text"])  # fmt: skip
def test_an_order_that_is_too_large_is_answered_with_an_error(monkeypatch: pytest.MonkeyPatch, more: Any, most: int):
    asked = Asked(monkeypatch)
    assert asked.pull(order(**more), most) == [REFUSED]
    assert len(asked.store.store()) == len(get_all_nested_objects(Message(Error(0, REFUSED), reply_to=order())))
    assert asked.pull(order(), 100_000) == []


def test_nothing_is_kept_of_an_app_that_does_not_run(monkeypatch: pytest.MonkeyPatch):
    """A server may name any number of runs, and of apps of 32 MB."""

    def named(run: int) -> Run:
        return replace(Run.create_empty(run), fab_id="x" * 10**6, override_config={"a": "y" * 10**6}, fab_hash="0",
                       primary_task_type="flwr-agentapp")  # fmt: skip

    def sent(*_: object) -> Fab:
        raise AssertionError("it is fetched")

    asked = Asked(monkeypatch)
    assert asked.pull(order(), 100_000, without=True, get_run=named, get_fab=sent) == []
    run = asked.state.get_run(3)
    assert run is not None and len(str(run)) < 2000 and asked.state.get_fab(run.fab_hash) is not None
    assert [task.type for task in asked.state.get_tasks()] == ["flwr-clientapp"]
