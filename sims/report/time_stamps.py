"""RFC 3161 time stamps: an authority signs a digest and the time. Uses the command `openssl ts`."""

import hashlib
import http.client
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from fedloom.conf.errors import UserError, plain

PATIENCE = 15.0  # seconds for the authority's answer
MOST_BYTES = 1 << 17  # of an answer
WITHOUT = "No proof is written; leave --timestamp out for one without a time stamp"


class TimeStampError(UserError):
    """The authority gives no time stamp."""


def check_authority(url: str) -> None:
    """Raise UserError if this is not the URL of an authority, or openssl is missing."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UserError(f"--timestamp: got '{url}', takes the URL of a time-stamping authority")
    if shutil.which("openssl") is None:
        raise UserError("--timestamp: needs the command openssl, which is not installed")


def time_stamp(content: bytes, url: str) -> bytes:
    """Return the answer (.tsr) of the authority at a URL, which states when it was sent the content's sha256.

    The reader decides whether to trust the authority.

    Raises:
        UserError: `check_authority` does.
        TimeStampError: The answer is not valid.
    """
    check_authority(url)
    with tempfile.TemporaryDirectory() as folder:
        data, query, reply = (Path(folder) / name for name in ("data", "query.tsq", "reply.tsr"))
        data.write_bytes(content)
        _openssl("-query", "-data", data, "-sha256", "-cert", "-out", query)
        answer = _answer(url, query.read_bytes())
        reply.write_bytes(answer)
        said = _openssl("-reply", "-in", reply, "-text")
    if "Status: Granted" not in said or hashlib.sha256(content).digest() not in answer:
        raise TimeStampError(f"--timestamp {url}: the answer is not a time stamp of this proof. {WITHOUT}")
    return answer


def _openssl(*words: str | Path) -> str:
    """Return the output of an `openssl ts` command, empty if it fails."""
    return subprocess.run(["openssl", "ts", *words], capture_output=True, text=True, errors="replace").stdout


def _answer(url: str, query: bytes) -> bytes:
    asked = urllib.request.Request(url, query, {"Content-Type": "application/timestamp-query"}, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return answer.read(MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise TimeStampError(f"--timestamp {url}: no answer ({plain(str(reason))}). {WITHOUT}") from None
