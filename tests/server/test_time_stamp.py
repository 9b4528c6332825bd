"""The time stamp of a proof, from an authority that openssl plays behind a local HTTP server."""

import contextlib
import hashlib
import http.server
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.conf import Config, UserError
from fedloom.sims.report import time_stamps
from fedloom.sims.report.proofs import write_proof
from tests.server.authorities import answering, authority_in, needs_openssl, openssl, serving
from tests.server.parts import folder
from tests.server.proofs import failed, verified


@pytest.fixture
def authority(tmp_path: Path) -> Callable[[bytes], bytes]:
    return authority_in(tmp_path)


@needs_openssl
def test_a_proof_has_the_time_stamp_that_its_command_verifies(
    forgotten: Config, tmp_path: Path, authority: Callable[[bytes], bytes]
):
    with answering(authority) as url, zipfile.ZipFile(write_proof(folder(forgotten), "r1", tmp_path / "p.zip", url)) as file:
        file.extractall(tmp_path / "proof")
    said = verified(tmp_path / "proof")
    command = next(line.strip() for line in said.stdout.splitlines() if "openssl ts -verify" in line)
    assert said.returncode == 0 and "ok    the time stamp is of the list of all files" in said.stdout
    assert command in (tmp_path / "proof" / "README.txt").read_text()
    words = command.replace("AUTHORITY.pem", str(tmp_path / "tsa.pem")).split()[1:]
    assert "Verification: OK" in openssl(tmp_path / "proof", *words).stdout
    (tmp_path / "proof" / "SHA256SUMS").write_text("another")
    assert "the time stamp is of the list of all files" in failed(verified(tmp_path / "proof").stdout)
    assert "Verification: OK" not in openssl(tmp_path / "proof", *words).stdout


def rejected(digest: bytes) -> bytes:
    """An authority's refusal, with the text `Status: Granted.` and the digest after its end."""
    text = b"\x0c\x10Status: Granted."
    status = b"\x02\x01\x02\x30" + bytes([len(text)]) + text
    return b"\x30" + bytes([len(status) + 2]) + b"\x30" + bytes([len(status)]) + status + digest


@needs_openssl
def test_a_refusal_is_no_time_stamp_whatever_its_text_says(
    forgotten: Config, tmp_path: Path, authority: Callable[[bytes], bytes]
):
    def refuse(query: bytes) -> bytes:
        at = query.index(bytes.fromhex("0420"))
        return rejected(query[at + 2 : at + 34])

    with answering(refuse) as url, pytest.raises(UserError, match="the answer is not a time stamp of this proof"):
        write_proof(folder(forgotten), "r1", tmp_path / "p.zip", url)
    with answering(authority) as url, zipfile.ZipFile(write_proof(folder(forgotten), "r1", tmp_path / "p.zip", url)) as file:
        file.extractall(tmp_path / "proof")
    digest = hashlib.sha256((tmp_path / "proof" / "SHA256SUMS").read_bytes()).digest()
    stamp = tmp_path / "proof" / "SHA256SUMS.tsr"
    for answer in (rejected(digest), digest, b"", stamp.read_bytes() + digest, stamp.read_bytes()[:-40] + digest):
        stamp.write_bytes(answer)
        assert failed(verified(tmp_path / "proof").stdout) == ["the time stamp is of the list of all files"], answer


@needs_openssl
def test_without_a_valid_answer_no_proof_is_written(
    forgotten: Config, tmp_path: Path, authority: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
):
    def refused(url: str, words: str) -> None:
        with pytest.raises(UserError, match=words):
            write_proof(folder(forgotten), "r1", tmp_path / "p.zip", url)
        assert not (tmp_path / "p.zip").exists()

    (tmp_path / "other").write_bytes(b"another")
    openssl(tmp_path, "ts", "-query", "-data", "other", "-sha256", "-cert", "-out", "other.tsq")
    of_other = authority((tmp_path / "other.tsq").read_bytes())
    for answer in (b"", b"<html>", of_other, rejected(hashlib.sha256((tmp_path / "other").read_bytes()).digest())):
        with answering(lambda query, answer=answer: answer) as url:
            refused(url, "the answer is not a time stamp of this proof.*No proof is written; leave --timestamp out")
    refused(url, r"no answer \(.*refused\).*No proof is written")
    with pytest.raises(UserError, match="--timestamp: got 'ftp://host', takes the URL"):
        time_stamps.check_authority("ftp://bob:secret@host")
    with pytest.raises(UserError, match="--timestamp: got 'file:///etc/passwd', takes the URL"):
        write_proof(folder(forgotten), "r1", tmp_path / "p.zip", "file:///etc/passwd")
    monkeypatch.setenv("PATH", "")
    refused(url, "needs the command openssl, which is not installed")


@needs_openssl
def test_an_authority_that_drips_or_leads_elsewhere_ends_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time_stamps, "PATIENCE", 1.0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path == "/slow%20header":
                self.drip(b"HTTP/1.1 200 OK\r\nX: ")
                return
            self.send_response(302 if self.path == "/redirect" else 200)
            self.send_header("Location", "http://a..b/")
            self.end_headers()
            if self.path == "/drip":
                self.drip(b"")

        def drip(self, begin: bytes) -> None:
            with contextlib.suppress(OSError):
                self.wfile.write(begin)
                for _ in range(40):
                    self.wfile.write(b"x")
                    time.sleep(0.2)

        def log_message(self, format: str, *_: object) -> None: ...

    with serving(Handler) as url:
        begin = time.monotonic()
        late = "it takes too long"
        for path, reason in {"/drip": late, "/slow%20header": late, "/redirect": "Found"}.items():
            with pytest.raises(time_stamps.TimeStampError, match=rf"no answer \({reason}"):
                time_stamps.time_stamp(b"content", url + path)
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("url", ["http://[::1", "http://a..b/", f"http://{'a' * 70}.b/", "http://x/ü", "http://exa mple/",
                                 "http://host:99999/", "http:///x", "ftp://x/", "\x1b[2J"])  # fmt: skip
def test_urls_that_cannot_be_asked_are_refused_in_one_line(url: str):
    with pytest.raises(UserError, match=r"--timestamp: got .*, takes the URL of a time-stamping authority") as error:
        time_stamps.check_authority(url)
    assert "\x1b" not in str(error.value)
