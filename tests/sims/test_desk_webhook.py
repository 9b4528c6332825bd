"""The desk's webhook: signed messages for each change of a request, whatever the receiver does."""

import contextlib
import hashlib
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from fedloom.server.ledger import Ledger
from fedloom.sims.desk.webhook import HEADER, LOG, Webhook
from fedloom.sims.web import NoAnswerError, post
from tests.sims.commands import ONE, TWO
from tests.sims.desks import Folder, browser, folder_with, until


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Folder:
    return folder_with(finished_run, tmp_path / "runs")


class Receiver(BaseHTTPRequestHandler):
    """Receives what a webhook sends; fails as often as it is asked to."""

    heard: ClassVar[list[tuple[str, bytes]]] = []
    failures: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status = self.failures.pop() if self.failures else 200
        if status == 200:  # before the answer: then the sender goes on
            self.heard.append((self.headers[HEADER], body))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[str]:
    Receiver.heard.clear()
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook"
    server.shutdown()
    server.server_close()


def test_each_change_of_a_request_is_sent_signed_also_after_the_desk_was_down(folder: Folder, receiver: str):
    def hook() -> Webhook:
        return Webhook(receiver, b"a secret of 16 characters", browser(folder).app.state.desk)  # type: ignore[attr-defined]

    with Ledger.open(folder.run, server=False) as ledger:
        ledger.receive("before", "unlearn", [TWO], "", {})
        with hook():  # what was there before is not sent
            pass
        ledger.receive("r1", "unlearn", [ONE], "why", {}, "dpo")
        ledger.cancel("r1", "ops")
    Receiver.failures[:] = [302, 500]
    later = hook()
    assert not later.look() and not later.look() and later.look() and later.look()
    heard = [json.loads(body) for _, body in Receiver.heard]
    assert [(one["run"], one["state"], one["request"]["id"]) for one in heard] == [
        ("digits", "received", "r1"), ("digits", "cancelled", "r1")]  # fmt: skip
    for header, body in Receiver.heard:
        sent, signature = (part.partition("=")[2] for part in header.split(","))
        assert abs(time.time() - int(sent)) < 60
        expected = hmac.new(b"a secret of 16 characters", f"{sent}.".encode() + body, hashlib.sha256).hexdigest()
        assert signature == expected


def test_the_webhook_outlives_answers_that_are_not_http_and_its_own_failures(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_babble, args=(server,), daemon=True).start()
        desk = browser(folder).app.state.desk  # type: ignore[attr-defined]
        hook = Webhook(f"http://127.0.0.1:{server.getsockname()[1]}/", b"a secret of 16 characters", desk)
        with Ledger.open(folder.run, server=False) as ledger:
            ledger.receive("r3", "unlearn", [ONE], "why", {}, "dpo")
        assert [hook._send({}) for _ in range(3)] == [False] * 3
        looks: list[int] = []

        def look(self: Webhook) -> bool:
            looks.append(1)
            if len(looks) == 1:
                raise OSError("no space left on device")
            return True

        monkeypatch.setattr("fedloom.sims.desk.webhook.EVERY_SECONDS", 0.05)
        monkeypatch.setattr(Webhook, "look", look)
        with hook:
            until(lambda: len(looks) > 2, "the webhook looks again")


def test_a_refused_message_holds_up_no_other_request_and_is_counted_and_logged_once(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    heard: list[str] = []

    def post(url: str, body: bytes, headers: object, seconds: float) -> bytes:
        if (delivery := json.loads(body)["delivery"]) == "digits/poison/received":
            raise NoAnswerError(f"Bad \x1b[2J{url}")
        heard.append(delivery)
        return b""

    monkeypatch.setattr("fedloom.sims.desk.webhook.post", post)
    for name, value in {"disabled": False, "propagate": False, "handlers": [caplog.handler]}.items():
        monkeypatch.setattr(LOG, name, value)  # whatever other tests in this process have set
    client = browser(folder)
    hook = Webhook("https://x/SECRET", b"a secret of 16 characters", client.app.state.desk)  # type: ignore[attr-defined]
    hook._path.write_text(json.dumps({"digits/good": None}))
    with Ledger.open(folder.run, server=False) as ledger:
        for id in ("poison", "good"):
            ledger.receive(id, "unlearn", [ONE], "why", {}, "dpo")
            ledger.cancel(id, "ops")
    assert [hook.look() for _ in range(3)] == [False] * 3
    assert heard == ["digits/good/received", "digits/good/refused"]
    measures = client.get("/metrics", headers=folder.bearer("viewer")).text
    assert 'fedloom_webhook_undelivered{run="digits"} 2' in measures
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 1 and "SECRET" not in logged[0] and logged[0].isprintable()


def test_no_log_has_the_address_of_a_message(
    folder: Folder, receiver: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    with caplog.at_level(logging.DEBUG):
        post(f"{receiver}/SECRET", b"x", {HEADER: "x"}, 10)
    assert "SECRET" not in caplog.text
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_babble, args=(server, [b"HTTP/1.1 400 \x9b31mred\r\n\r\n"]), daemon=True).start()
        with pytest.raises(NoAnswerError) as refusal:
            post(f"http://127.0.0.1:{server.getsockname()[1]}/", b"x", {}, 10)
    assert str(refusal.value).isprintable()


NO_HTTP = (b"oops, the proxy restarts\r\n", b"HTTP/1.1 200 " + b"x" * 200_000, b"")  # not HTTP, an endless line, nothing


def _babble(server: socket.socket, answers: Sequence[bytes] = NO_HTTP) -> None:
    """Give these answers, one for each connection."""
    for answer in answers:
        with server.accept()[0] as line, contextlib.suppress(OSError):
            line.recv(65536)
            line.sendall(answer)
