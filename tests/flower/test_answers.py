"""What a server may answer a node: none of it makes a node hang, or takes its memory, or leads its requests elsewhere."""

from pathlib import Path

import httpx
import pytest
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import Message
from flwr.supercore.heartbeat import HeartbeatFailure, HeartbeatSender

from sims.federation.heartbeats import keep_beating
from tests.flower.server import GREETINGS, Answer, answering, node

pytestmark = pytest.mark.timeout(120)
END_SECONDS = 60
ODD: dict[str, Answer] = {
    "500": (500, {}, b""),
    "junk": (200, {}, b"\xff\xff"),
    "no tree": (200, {}, PullMessagesResponse(messages_list=[Message()]).SerializeToString()),
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


def test_a_heartbeat_is_sent_again_whatever_is_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(HeartbeatSender, "_heartbeat", HeartbeatSender._heartbeat)  # as it is, afterwards
    told: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, kind: told.append(kind))
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
    assert not told
    answered(RuntimeError("does not recognize this SuperNode"))._heartbeat()
    assert told
