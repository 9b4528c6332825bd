"""A server that answers a node whatever it likes: what a hostile operator may run in a SuperLink's place."""

import contextlib
import http.server
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flwr.proto.fleet_pb2 import ActivateNodeResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse

from fedloom.sims.federation.keys import write_certificates
from fedloom.sims.federation.programs import environment, free_port
from fedloom.sims.federation.proxies import without
from tests.node_keys import write_node_key

Answer = tuple[int, dict[str, str], bytes]  # status, heads, body
GREETINGS = {
    "/v1/fleet/activate-node": ActivateNodeResponse(node_id=5).SerializeToString(),
    "/v1/fleet/send-node-heartbeat": SendNodeHeartbeatResponse(success=True).SerializeToString(),
    "/v1/fleet/deactivate-node": b"",
}


@contextlib.contextmanager
def answering(folder: Path, answers: Callable[[str], Answer]) -> Iterator[int]:
    """The port of a server with TLS, whose certificates are in the folder, that answers each path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            status, heads, body = answers(self.path)
            self.send_response(status)
            size = {} if "transfer-encoding" in heads else {"content-length": str(len(body))}
            for name, text in {"content-type": "application/protobuf", **size, **heads}.items():
                self.send_header(name, text)
            self.end_headers()
            with contextlib.suppress(OSError):  # the caller has had enough
                self.wfile.write(body)

        do_GET = do_PUT = do_DELETE = do_POST

        def log_message(self, format: str, *args: object) -> None:
            pass

    folder.mkdir(exist_ok=True)
    write_certificates(folder, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def node(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """A node's program, as what keeps it running starts it, whose server is at a port; its words go to `log.txt`."""
    write_node_key(folder)
    (folder / "node.toml").write_text('site = "a"\n')
    words = ["--superlink", f"127.0.0.1:{port}", "--node-config", "node.toml", "--root-certificates", "ca.crt"]
    words += ["--auth-supernode-private-key", "key"]
    command = [sys.executable, "-m", "fedloom.sims.federation.supernode", str(free_port()), "cold", "own", "0", *words]
    with (folder / "log.txt").open("wb") as log:
        env = without(environment({"FLWR_HOME": str(folder / "flwr"), "PYTHONPATH": str(Path(__file__).parents[2])}))
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
