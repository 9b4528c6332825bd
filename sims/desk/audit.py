"""The desk's own record of acts that change no run: log-ins, downloads, tokens, refused attempts. Lines are hash-chained.

Acts that change a run are in its ledger, with the token's name.
"""

import errno
import io
import json
import os
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import IO, Any

import portalocker

from fedloom.conf.errors import UserError, plain
from fedloom.server.ledger.tables import START, Event, canonical, link
from fedloom.sims.desk.tokens import FOLDER

FILE = "audit.jsonl"
MOST_TEXT = 200  # characters of a value
_TAIL = 65_536  # bytes in which the last line begins


class RecordError(UserError):
    """The record cannot be written."""


class Audit:
    """The file of a folder of runs, to which several processes may append."""

    def __init__(self, root: Path) -> None:
        self.path = root / FOLDER / FILE

    def note(self, kind: str, by: str, **facts: Any) -> None:
        """Append a line: what is done, by whom (a token's name, or an address). Call this before the act.

        Raises RecordError if the line cannot be written. The act must not happen then.
        """
        body = canonical({"by": _short(by), **{key: _short(fact) for key, fact in facts.items()}})
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            with portalocker.Lock(self.path, "a+b", timeout=10, buffering=0) as file:
                os.fchmod(file.fileno(), 0o600)
                last = _last(file)
                time = datetime.now(UTC).isoformat(timespec="milliseconds")
                digest = link(last.digest, last.id + 1, time, kind, body)
                _append(file, f"{json.dumps([last.id + 1, time, kind, body, last.digest, digest])}\n".encode())
        except (OSError, portalocker.LockException) as error:
            why = getattr(error, "strerror", "") or "another process holds its lock"
            raise RecordError(f"{self.path}: cannot be written ({why}), so nothing was done. "
                              "Free some space or correct the permissions, then try again") from None  # fmt: skip

    def newest(self, most: int) -> list[Event]:
        """Return the last lines, the newest first."""
        with self._open() as file:
            return [event for line in list(file)[-most:][::-1] if (event := _event(line))]

    def problem(self) -> str:
        """Return the first fault of the chain as text; empty if it is whole."""
        before = START
        with self._open() as file:
            for number, event in enumerate(map(_event, file), 1):
                if event is None or event.previous != before or event.id != number or event.digest != link(
                    before, number, event.time, event.kind, canonical(event.body)
                ):  # fmt: skip
                    return f"line {number} is damaged, or does not follow from the line before it"
                before = event.digest
        return ""

    def _open(self) -> IO[bytes]:
        return self.path.open("rb") if self.path.is_file() else io.BytesIO()


def _last(file: IO[bytes]) -> Event:
    """Return the last readable line of an open file, or the start of the chain. Ends a line that a crash tore."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL))
    lines = file.read().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        file.write(b"\n")
    return next((event for line in reversed(lines) if (event := _event(line))), Event(0, "", "", {}, START, START))


def _append(file: IO[bytes], line: bytes) -> None:
    """Append a line to an unbuffered file, or nothing. Raises OSError on a full disk."""
    size = file.seek(0, os.SEEK_END)
    try:
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(size)
        raise


def _event(line: bytes) -> Event | None:
    """Return the event in a line; None if the line is damaged."""
    try:
        id, time, kind, text, previous, digest = json.loads(line)
        body = json.loads(text)
        datetime.fromisoformat(time)
    except (ValueError, TypeError, RecursionError):
        return None
    whole = type(id) is int and isinstance(kind, str) and isinstance(body, dict)
    whole = whole and all(isinstance(one, str) and one.isascii() for one in (time, previous, digest))
    return Event(id, time, kind, body, previous, digest) if whole and all(map(_is_fact, body.values())) else None


def _is_fact(fact: Any) -> bool:
    return isinstance(fact, str | int | None) or (isinstance(fact, float) and isfinite(fact))


def _short(fact: Any) -> Any:
    return plain(fact)[:MOST_TEXT] if isinstance(fact, str) else fact
