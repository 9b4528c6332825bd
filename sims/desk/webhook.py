"""Send a signed message for each change of a request's state, at least once, also after the desk was down."""

import hashlib
import hmac
import json
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fedloom.clients.storage.states import write_bytes
from fedloom.conf.errors import UserError
from fedloom.server.run_folder.listing import read_object
from fedloom.sims.desk.desk import Desk
from fedloom.sims.desk.tokens import FOLDER
from fedloom.sims.operations.requests import RequestStatus, plain_values
from fedloom.sims.web import NoAnswerError, post

LOG = logging.getLogger("uvicorn.error")  # the desk's output
FILE, HEADER = "webhook.json", "Fedloom-Signature"
EVERY_SECONDS, LONGEST_WAIT, TIMEOUT = 2.0, 300.0, 10.0
SHORTEST_SECRET = 16


@dataclass
class Webhook:
    """Watches the requests of all runs in its own thread, inside a `with` block."""

    url: str
    secret: bytes
    desk: Desk
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def _path(self) -> Path:
        return self.desk.runs.root / FOLDER / FILE

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def start(self) -> None:
        """Begin to watch. At the first start with this folder, earlier states are not sent."""
        if not self._path.exists():
            self._save({id: list(one.times) for id, one in self._now().items()})
        threading.Thread(target=self._watch, name="webhook", daemon=True).start()

    def _watch(self) -> None:
        wait = EVERY_SECONDS
        while not self._stop.wait(wait):
            try:
                delivered = self.look()
            except Exception as error:  # such as a full disk
                LOG.error("the webhook tries again later: %s", error)
                delivered = False
            wait = EVERY_SECONDS if delivered else min(LONGEST_WAIT, 2 * wait)

    def look(self) -> bool:
        """Send all changes since the last one that was delivered, in order. Return whether all were delivered."""
        sent = read_object(self._path)
        for id, request in self._now().items():
            for state in [one for one in request.times if one not in sent.get(id, [])]:
                shown = request.state if state == list(request.times)[-1] else state
                run = id.partition("/")[0]
                message = {"delivery": f"{id}/{state}", "run": run, "state": shown, "request": plain_values(request)}
                if not self._send(message):
                    return False
                sent[id] = [*sent.get(id, []), state]
                self._save(sent)
        return True

    def _now(self) -> dict[str, RequestStatus]:
        found: dict[str, RequestStatus] = {}
        for run in self.desk.runs.paths():
            try:
                found |= {f"{run}/{request.id}": request for request in self.desk.requests(run)}
            except Exception:  # no ledger yet, or its files are damaged in any way
                continue
        return found

    def _save(self, states: dict[str, list[str]]) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        write_bytes(self._path, json.dumps(states).encode(), private=True)

    def _send(self, message: dict[str, Any]) -> bool:
        body = json.dumps(message).encode()
        headers = {"Content-Type": "application/json", HEADER: signature(self.secret, body, int(time.time()))}
        try:
            post(self.url, body, headers, TIMEOUT)
        except NoAnswerError:
            return False
        return True


def signature(secret: bytes, body: bytes, time: int) -> str:
    """Return the header's value: the time, and the HMAC-SHA256 of `TIME.BODY`."""
    return f"t={time},v1={hmac.new(secret, f'{time}.'.encode() + body, hashlib.sha256).hexdigest()}"


def secret_in(path: Path) -> bytes:
    """Return the secret in a file. Raises UserError if it is missing or short."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"--webhook-secret-file: {path}: {error.strerror}") from None
    if len(secret) < SHORTEST_SECRET:
        raise UserError(f"--webhook-secret-file: {path}: needs at least {SHORTEST_SECRET} characters")
    return secret
