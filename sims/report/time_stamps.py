"""RFC 3161 time stamps: an authority signs a digest and the time. Uses the command `openssl ts`."""

import hashlib
import http.client
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedloom.conf.errors import UserError, plain

PATIENCE = 15.0  # seconds for the authority's answer
MOST_BYTES = 1 << 17  # of an answer
WITHOUT = "No proof is written; leave --timestamp out for one without a time stamp"


class TimeStampError(UserError):
    """The authority gives no time stamp."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """Follow no redirection: it would lead to a host that the operator did not choose."""


def check_authority(url: str) -> None:
    """Raise UserError if this is not the URL of an authority, TimeStampError if openssl is missing."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        parts.netloc.encode("idna")
        url.encode("ascii")
    except ValueError:
        sound = False
    if not sound or " " in url:
        raise UserError(f"--timestamp: got '{plain(url)}', takes the URL of a time-stamping authority")
    if shutil.which("openssl") is None:
        raise TimeStampError("--timestamp: needs the command openssl, which is not installed")


def time_stamp(content: bytes, url: str) -> bytes:
    """Return the answer (.tsr) of the authority at a URL, which states when it was sent the content's sha256.

    The reader decides whether to trust the authority.

    Raises:
        UserError: `check_authority` does.
        TimeStampError: The answer is not valid, or takes longer than PATIENCE.
    """
    check_authority(url)
    with tempfile.TemporaryDirectory() as folder:
        data, query, reply = (Path(folder) / name for name in ("data", "query.tsq", "reply.tsr"))
        data.write_bytes(content)
        try:
            _openssl("-query", "-data", data, "-sha256", "-cert", "-out", query)
            answer = _answer(url, query.read_bytes())
            reply.write_bytes(answer)
            said = _openssl("-reply", "-in", reply, "-text")
        except (OSError, http.client.HTTPException, ValueError, subprocess.SubprocessError) as error:
            reason = getattr(error, "reason", None) or error
            raise TimeStampError(f"--timestamp {url}: no answer ({plain(str(reason))}). {WITHOUT}") from None
    if "Status: Granted" not in said or hashlib.sha256(content).digest() not in answer:
        raise TimeStampError(f"--timestamp {url}: the answer is not a time stamp of this proof. {WITHOUT}")
    return answer


def _openssl(*words: str | Path) -> str:
    """Return the output of an `openssl ts` command, empty if it fails."""
    command = ["openssl", "ts", *words]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE).stdout


def _answer(url: str, query: bytes) -> bytes:
    """Return the authority's answer. Raises OSError, HTTPException or ValueError; redirections are not followed."""
    asked = urllib.request.Request(url, query, {"Content-Type": "application/timestamp-query"}, method="POST")
    end, content = time.monotonic() + PATIENCE, b""
    with urllib.request.build_opener(_NoRedirect).open(asked, timeout=PATIENCE) as answer:
        while len(content) < MOST_BYTES and (piece := answer.read1(MOST_BYTES)):
            content += piece
            if time.monotonic() > end:
                raise TimeoutError("it takes too long")
    return content
