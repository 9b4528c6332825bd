"""A time-stamping authority that openssl plays behind a local HTTP server."""

import contextlib
import http.server
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a server with this handler."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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

    with serving(Handler) as url:
        yield url


def authority_in(home: Path) -> Callable[[bytes], bytes]:
    """An authority with its files in a folder, that answers a query with a token. Its certificate is tsa.pem."""
    (home / "tsa.conf").write_text(AUTHORITY)
    (home / "serial").write_text("01")
    made = openssl(home, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "tsa.key", "-out", "tsa.pem",
                   "-subj", "/CN=authority", "-config", "tsa.conf", "-days", "2")  # fmt: skip
    assert made.returncode == 0, made.stderr

    def reply(query: bytes) -> bytes:
        (home / "query.tsq").write_bytes(query)
        said = openssl(home, "ts", "-reply", "-config", "tsa.conf", "-queryfile", "query.tsq", "-out", "reply.tsr")
        assert said.returncode == 0, said.stderr
        return (home / "reply.tsr").read_bytes()

    return reply
