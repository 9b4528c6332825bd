"""RFC 3161 time stamps: an authority signs a digest and the time. Uses the command `openssl ts`."""

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from fedloom.conf.errors import UserError, plain, public

PATIENCE = 15.0  # seconds for the authority's answer
WITHOUT = "No proof is written; leave --timestamp out for one without a time stamp"


class TimeStampError(UserError):
    """The authority gives no time stamp."""


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
        raise UserError(f"--timestamp: got '{plain(public(url))}', takes the URL of a time-stamping authority")
    if shutil.which("openssl") is None:
        raise TimeStampError("--timestamp: needs the command openssl, which is not installed")


def time_stamp(content: bytes, url: str) -> bytes:
    """Return the answer (.tsr) of the authority at a URL, which states when it was sent the content's sha256.

    The reader decides whether to trust the authority.

    Raises:
        UserError: `check_authority` does.
        TimeStampError: The answer is not valid, or takes longer than PATIENCE.
    """
    from fedloom.sims.web import NoAnswerError, post  # imported only here: slow

    check_authority(url)
    with tempfile.TemporaryDirectory() as folder:
        data, query, reply, token = (Path(folder) / name for name in ("data", "query.tsq", "reply.tsr", "token"))
        data.write_bytes(content)
        try:
            _openssl("-query", "-data", data, "-sha256", "-cert", "-out", query)
            answer = post(url, query.read_bytes(), {"Content-Type": "application/timestamp-query"}, PATIENCE)
            reply.write_bytes(answer)
            _openssl("-reply", "-in", reply, "-token_out", "-out", token)
            said = _openssl("-reply", "-in", token, "-token_in", "-text")
        except (NoAnswerError, OSError, subprocess.SubprocessError) as error:
            raise TimeStampError(f"--timestamp {public(url)}: no answer ({plain(str(error))}). {WITHOUT}") from None
    if hashlib.sha256(content).digest() != _imprint(said):
        raise TimeStampError(f"--timestamp {public(url)}: the answer is not a time stamp of this proof. {WITHOUT}")
    return answer


def _openssl(*words: str | Path) -> str:
    """Return the output of an `openssl ts` command, empty if it fails."""
    command = ["openssl", "ts", *words]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE).stdout


def _imprint(said: str) -> bytes:
    """Return the digest that openssl shows of a token; empty without a token, as of a request that was rejected."""
    lines = re.findall(r"^ {4}[0-9a-f]{4} - ((?:[0-9a-f]{2}[ -]){16})", said, re.MULTILINE)
    return bytes.fromhex("".join(lines[:2]).replace("-", " "))
