"""Send a signed message for each change of a request's state, at least once, also after the desk was down."""

import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fedloom.clients.storage.states import write_bytes
from fedloom.conf.errors import UserError, plain
from fedloom.server.run_folder.listing import read_object
from fedloom.sims.desk.desk import Desk
from fedloom.sims.desk.tokens import FOLDER
from fedloom.sims.operations.requests import RequestStatus, plain_values
from fedloom.sims.web import NoAnswerError, post

LOG = logging.getLogger("uvicorn.error")  # the desk's output
FILE, HEADER = "webhook.json", "Fedloom-Signature"
EVERY_SECONDS, LONGEST_WAIT, TIMEOUT = 2.0, 300.0, 10.0
SHORTEST_SECRET = 16
MOST_LOGGED, MOST_FAILURES = 20, 5  # different faults in the log, failures before the runs are looked at again
_FRESH = (0.0, EVERY_SECONDS)  # a request whose messages did not fail


@dataclass
class Webhook:
    """Watches the requests of all runs in its own thread, inside a `with` block."""

    url: str
    secret: bytes
    desk: Desk
    _stop: threading.Event = field(default_factory=threading.Event)
    _again: dict[str, tuple[float, float]] = field(default_factory=dict)  # by request: when to send again, the wait
    _resting: set[str] = field(default_factory=set)  # requests that wait now
    _logged: set[str] = field(default_factory=set)

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
            now = time.monotonic()
            self._resting = {id for id, (end, _) in self._again.items() if now < end}
            try:
                self.look()
                wait = EVERY_SECONDS
            except Exception as error:  # such as a full disk
                self._log("the webhook tries again later: %s", error)
                wait = min(LONGEST_WAIT, 2 * wait)

    def look(self) -> bool:
        """Send all changes since the last delivered ones, those of a request in order. Return whether all were delivered.

        A request whose message is refused does not hold up others. Those that failed most come last.
        """
        sent = {id: states for id, states in read_object(self._path).items() if isinstance(states, list)}
        found = {id: self._news(id, one, sent) for id, one in self._now().items()}
        left = {id: messages for id, messages in found.items() if messages}
        failures = 0
        for id in sorted(left.keys() - self._resting, key=lambda id: self._again.get(id, _FRESH)[1]):
            if failures == MOST_FAILURES:  # later ones, and new ones, get their turn first
                break
            for state, message in list(left[id].items()):
                if not self._send(message):
                    self._failed(id)
                    failures += 1
                    break
                self._again.pop(id, None)
                sent[id] = [*sent.get(id, []), state]
                self._save(sent)
                del left[id][state]
        self._count({id: len(messages) for id, messages in left.items() if messages})
        return not any(left.values())

    def _news(self, id: str, request: RequestStatus, sent: Mapping[str, list[Any]]) -> dict[str, dict[str, Any]]:
        """Return the messages about a request that were not delivered yet, by the state that they report."""
        run, last, content = id.partition("/")[0], list(request.times)[-1:], plain_values(request)
        return {
            state: {"delivery": f"{id}/{state}", "run": run, "request": content,
                    "state": request.state if [state] == last else state}
            for state in request.times if state not in sent.get(id, [])
        }  # fmt: skip

    def _failed(self, id: str) -> None:
        wait = min(LONGEST_WAIT, 2 * self._again.get(id, _FRESH)[1])
        self._again[id] = time.monotonic() + wait, wait

    def _log(self, text: str, fault: object) -> None:
        """Log a fault once, until all is delivered. The receiver chooses some of its text."""
        shown = plain(str(fault)).replace(self.url, "the URL")
        if shown not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(shown)
            LOG.error(text, shown)

    def _count(self, undelivered: dict[str, int]) -> None:
        self.desk.undelivered.clear()
        self.desk.undelivered.update(undelivered)
        self._again = {id: times for id, times in self._again.items() if id in undelivered}
        if not undelivered:
            self._logged.clear()

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
        except NoAnswerError as error:
            self._log("the webhook's receiver refuses a message or cannot be reached; the desk sends it again: %s", error)
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
