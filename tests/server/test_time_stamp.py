"""The time stamp of a proof, from an authority that openssl plays behind a local HTTP server."""

import contextlib
import http.server
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedloom.conf import Config, UserError
from fedloom.sims.report.proofs import write_proof
from tests.server.parts import folder
from tests.server.proofs import failed, verified

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
AUTHORITY = """
[tsa]
default_tsa = here
[here]
serial = serial
signer_cert = tsa.pem
signer_key = tsa.key
certs = tsa.pem
signer_digest = sha256
default_policy = 1.2.3.4
digests = sha256
[req]
distinguished_name = name
x509_extensions = stamping
[name]
[stamping]
extendedKeyUsage = critical,timeStamping
"""


def openssl(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["openssl", *words], cwd=home, capture_output=True, text=True)


@contextlib.contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """The URL of a server that answers each query so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = answer(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200 if self.headers["content-type"] == "application/timestamp-query" else 400)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def authority(tmp_path: Path) -> Callable[[bytes], bytes]:
    """An authority that answers a query with a token."""
    (tmp_path / "tsa.conf").write_text(AUTHORITY)
    (tmp_path / "serial").write_text("01")
    made = openssl(tmp_path, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "tsa.key", "-out", "tsa.pem",
                   "-subj", "/CN=authority", "-config", "tsa.conf", "-days", "2")  # fmt: skip
    assert made.returncode == 0, made.stderr

    def reply(query: bytes) -> bytes:
        (tmp_path / "query.tsq").write_bytes(query)
        said = openssl(tmp_path, "ts", "-reply", "-config", "tsa.conf", "-queryfile", "query.tsq", "-out", "reply.tsr")
        assert said.returncode == 0, said.stderr
        return (tmp_path / "reply.tsr").read_bytes()

    return reply


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


@needs_openssl
def test_without_a_valid_answer_no_proof_is_written(
    forgotten: Config, tmp_path: Path, authority: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
):
    def refused(url: str, words: str) -> None:
        with pytest.raises(UserError, match=f"{words}.*No proof is written; leave --timestamp out"):
            write_proof(folder(forgotten), "r1", tmp_path / "p.zip", url)
        assert not (tmp_path / "p.zip").exists()

    (tmp_path / "other").write_bytes(b"another")
    openssl(tmp_path, "ts", "-query", "-data", "other", "-sha256", "-cert", "-out", "other.tsq")
    of_other = authority((tmp_path / "other.tsq").read_bytes())
    for answer in (b"", b"<html>", of_other):
        with answering(lambda query, answer=answer: answer) as url:
            refused(url, "the answer is not a time stamp of this proof")
    refused(url, r"no answer \(.*refused\)")
    with pytest.raises(UserError, match="--timestamp: got 'file:///etc/passwd', takes the URL"):
        write_proof(folder(forgotten), "r1", tmp_path / "p.zip", "file:///etc/passwd")
    monkeypatch.setenv("PATH", "")
    refused(url, "needs the command openssl, which is not installed")
