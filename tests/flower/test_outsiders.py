"""Who can do what at a real federation's ports: others on the network, other users of the machines, other sites."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tomli_w
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedloom.sims.federation import local
from fedloom.sims.federation.bodies import SMALL
from fedloom.sims.federation.checks import check
from fedloom.sims.federation.doors import FLEET as PATHS
from fedloom.sims.federation.machines import registered
from fedloom.sims.federation.plan import CONNECTION, KEYS, SERVER, sites_of
from fedloom.sims.federation.programs import BIN, environment, free_port
from fedloom.sims.federation.sheets import SITE, SiteSheet, read, write
from fedloom.sims.federation.supernode import OWN
from tests.flower.machines import flwr, online, program, run, until
from tests.flower.outsider import CONTROL, FLEET, RUNTIME, answer, pem, said, signed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def port(federation: Path) -> int:
    """The nodes' door."""
    return int(read(SiteSheet, federation / "site-0000" / SITE).superlink.rpartition(":")[2])


@pytest.fixture(scope="module")
def owners(federation: Path) -> int:
    """The owner's door, on loopback."""
    text = (federation / SERVER / "flwr" / "config.toml").read_text()
    return int(tomllib.loads(text)["superlink"][CONNECTION]["address"].rpartition(":")[2])


def test_the_nodes_door_answers_nothing_but_what_nodes_ask(port: int):
    for name in CONTROL.split():
        assert answer(HERE, port, f"/v1/control/{name}") == 404
    for name in RUNTIME.split():
        assert answer(HERE, port, f"/v1/runtime/{name}") == 404
    others = ["/", "/health", "/docs", "/openapi.json", "/v1/fleet/", "/v1/fleet/register-node", "/v1/fleet/unregister-node"]
    assert {answer(HERE, port, path, method) for path in others for method in ("GET", "POST", "HEAD", "PUT")} == {404}


@pytest.mark.parametrize("path", [
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "//v1/control/list-runs",
    "/v1/fleet/pull-object/../../control/list-runs", "/v1/fleet/%70ull-object", "/V1/fleet/pull-object",
    "/v1/fleet/pull-object?x=/v1/control/list-runs", "/v1/control/list-runs?/v1/fleet/pull-object", "/v1/fleet/pull-object/",
    "/v1/fleet/pull-object%00", "https://127.0.0.1/v1/control/list-runs", "/v1/fleet/pull-object;/v1/control/list-runs",
])  # fmt: skip
def test_no_way_of_writing_a_path_leads_past_the_door(port: int, path: str):
    assert answer(HERE, port, path) in (400, 404)


@pytest.mark.parametrize("head", [
    b"Content-Length: 0\r\nTransfer-Encoding: chunked", b"Content-Length: 5\r\nContent-Length: 0",
    b"Transfer-Encoding: chunked", b"Content-Length: -1", b"Content-Length: +5", b"Host: a\r\nHost: b",
    b"X: y\r\n folded: z", b"Upgrade: h2c\r\nConnection: Upgrade", b"X: y",
])  # fmt: skip
def test_nothing_is_smuggled_behind_a_request(port: int, head: bytes):
    """A second request rides behind one whose length can be read in two ways: it is never answered as if it were one."""
    second = b"POST /v1/control/list-runs HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    output = said(HERE, port, b"POST /v1/fleet/pull-object HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n0\r\n\r\n" + second)
    assert output.split(b" ")[1] in (b"400", b"401", b"404", b"411") and b" 200 " not in output, output


def test_only_whoever_holds_the_key_of_a_member_is_heard(federation: Path, port: int):
    """Not a key of one's own, nor the public key of a member, nor a signature of long ago; and no body is read before."""
    stranger, member = ec.generate_private_key(ec.SECP384R1()), pem(federation / SERVER / KEYS / "site-0000.pub")
    tried = {
        "nothing": {},
        "a key of one's own": signed(stranger),
        "a member's public key": signed(stranger, member),
        "no base64": {**signed(stranger), "flwr-public-key": "%"},
        "no key": {**signed(stranger), "flwr-public-key": "QUJD"},
        "no time": {**signed(stranger, member), "flwr-timestamp": "now"},
        "a time without a place": {**signed(stranger, member), "flwr-timestamp": "2026-01-01T00:00:00"},
    }
    for name in FLEET.split():
        assert {
            what: answer(HERE, port, f"/v1/fleet/{name}", **headers) for what, headers in tried.items()
        } == dict.fromkeys(tried, 401)
    key = _private(federation / "site-0000")
    old = {**signed(key), "flwr-timestamp": "2020-01-01T00:00:00+00:00"}
    assert answer(HERE, port, "/v1/fleet/pull-messages", **old) == 401
    assert answer(HERE, port, "/v1/fleet/pull-messages", **signed(key), content_length=str(SMALL + 1)) == 413
    large = said(HERE, port, b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
    assert large.startswith(b"HTTP/1.1 401 ")  # without waiting for what does not come


def _private(home: Path) -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    key = load_ssh_private_key((home / "key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def test_a_node_is_not_another_node(federation: Path, port: int):
    """With its own key it asks for what is another's. (Its own program stands still: its requests would end these.)"""
    key = _private(federation / "site-0000")
    other = int(registered(federation / SERVER / KEYS / "site-0001.pub"))
    root = (federation / "site-0000" / "ca.crt").read_bytes()
    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    ]
    os.kill(program(federation / "site-0000"), signal.SIGSTOP)
    try:
        with FleetHttpClient.from_server_address(f"{HERE}:{port}", False, root, interceptors) as client:
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                client.PullMessages(PullMessagesRequest(node=Node(node_id=other)))
            own = int(registered(federation / SERVER / KEYS / "site-0000.pub"))
            client.PullMessages(PullMessagesRequest(node=Node(node_id=own)))
    finally:
        os.kill(program(federation / "site-0000"), signal.SIGCONT)


def test_the_owners_door_opens_to_who_can_read_the_servers_folder(federation: Path, owners: int):
    """A local user reaches it on loopback, and has no token; nobody else reaches it."""
    for name in CONTROL.split():
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic eDp5"}):
            assert answer(HERE, owners, f"/v1/control/{name}", **headers) == 401
    assert {answer(HERE, owners, path) for path in PATHS} == {404}
    _closed_to_strangers(owners)
    assert "nodes" in flwr(federation / SERVER, "supernode", "list", CONNECTION, "--format", "json")
    listening = subprocess.run(["ss", "-ltn"], capture_output=True, text=True).stdout if shutil.which("ss") else ""
    assert not any(f"{host}:{owners} " in listening for host in ("0.0.0.0", "*", "[::]"))


def _closed_to_strangers(port: int) -> None:
    """No Runtime request of somebody without a token or the secret is read, whatever it says of itself."""
    for name in RUNTIME.split():
        for headers in ({}, {"flwr-task-token": "x"}, {"flwr-superexec-signature": "x"}, {"content-length": "99999999"}):
            assert answer(HERE, port, f"/v1/runtime/{name}", **headers) == 401
    for path in ("/", "/health", "/docs", "/openapi.json", "/v1/runtime/", "/v1/runtime/create-task"):
        assert {answer(HERE, port, path, method) for method in ("GET", "POST")} == {404}


def test_a_nodes_port_answers_its_own_programs_alone(federation: Path):
    _closed_to_strangers(_port_of_node(federation / "site-0000"))


def _port_of_node(home: Path) -> int:
    words = psutil.Process(program(home)).cmdline()
    return int(words[words.index("fedloom.sims.federation.supernode") + 1])


def test_a_local_user_takes_no_task_at_a_port(federation: Path, owners: int):
    """The attack of steal.py at the server and at a node, with the certificate that they have."""
    ports = [(owners, federation / SERVER / "ca.crt", TaskType.SERVER_APP)]
    home = federation / "site-0000"
    ports += [(_port_of_node(home), home / OWN / "ca.crt", TaskType.CLIENT_APP)]
    for port, root, kind in ports:
        client = RuntimeHttpClient.from_server_address(
            server_address=f"{HERE}:{port}",
            insecure=False,
            root_certificates=root.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        )
        with client, pytest.raises(httpx.HTTPStatusError, match=r"401|403"):
            client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))


def test_no_token_and_no_secret_is_on_a_command_line_or_in_a_file_for_others(federation: Path, tmp_path: Path):
    seen, stop = set(), threading.Event()

    def look() -> None:
        while not stop.is_set():
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    seen.add(" ".join(process.cmdline()))
            time.sleep(0.1)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        assert run(federation, tmp_path, "watched", "rounds=1")["status"] == "finished"
    finally:
        stop.set()
        watch.join()
    ours = [words for words in seen if "fedloom.sims.federation" in words or "flwr-" in words]
    assert any("fedloom.sims.federation.task" in words for words in ours), "the ServerApp was not seen"
    assert not any("--token" in words for words in ours)
    homes = [federation / SERVER, *(federation / name for name in sites_of(federation))]
    for home in homes:
        assert home.stat().st_mode & 0o077 == 0
        private = [
            "server.key",
            "key",
            "state.db",
            "flwr",
            "flwr/credentials.yaml",
            "own",
            "own/secret",
            "own/server.key",
            "store",
        ]
        assert not [name for name in private if (home / name).exists() and (home / name).stat().st_mode & 0o077], home


def test_a_site_that_was_removed_comes_back(federation: Path):
    """Flower takes no key a second time."""
    public = federation / SERVER / KEYS / "site-0002.pub"
    node = registered(public)
    flwr(federation / SERVER, "supernode", "unregister", node, CONNECTION, "--format", "json")
    until(lambda: node not in online(federation), "it is still in")
    os.utime(public)
    until(lambda: node in online(federation), "it does not come back")


def test_a_connection_on_which_nothing_comes_does_not_keep_others_out(federation: Path, port: int, tmp_path: Path):
    idle = [socket.create_connection((HERE, port)) for _ in range(300)]
    try:
        assert answer(HERE, port, "/v1/fleet/pull-messages") == 401
        assert run(federation, tmp_path, "beside", "rounds=1")["status"] == "finished"
    finally:
        for one in idle:
            one.close()


def test_messages_of_forty_megabytes_go_through(federation: Path, tmp_path: Path):
    more = ["rounds=1", "network={name: mlp, widths: [3100, 3100]}", "training.steps=1", "evaluation.sites=0"]
    assert run(federation, tmp_path, "large", *more)["status"] == "finished"
    line = json.loads((tmp_path / "large" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["replies"] == 3


FOREIGN = """
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
server = ServerApp()
client = ClientApp()
@server.main()
def main(grid, context):
    sent = set(grid.push_messages([Message(RecordDict(), node, "train") for node in grid.get_node_ids()]))
    answers = []
    while sent and time.sleep(0.3) is None:
        replies = list(grid.pull_messages(sent))
        sent -= {reply.metadata.reply_to_message_id for reply in replies}
        answers += [str(reply.error.reason) if reply.has_error() else "done" for reply in replies]
    Path("OUT").write_text(chr(10).join(answers))
@client.train()
def train(message, context):
    Path("foreign-was-here").touch()
    return Message(RecordDict(), reply_to=message)
"""


def test_a_site_runs_the_app_that_is_installed_there_and_no_other(federation: Path, tmp_path: Path):
    """But for one whose sheet says so. The server's own user has a foreign app run; site-0001 starts a program for it."""
    app, out = tmp_path / "app", tmp_path / "out"
    app.mkdir()
    (app / "foreign.py").write_text(FOREIGN.replace("OUT", str(out)))
    parts = {"publisher": "nobody", "components": {"serverapp": "foreign:server", "clientapp": "foreign:client"}}
    project = {"name": "foreign", "version": "1.0.0", "description": "", "license": "Apache-2.0"}
    (app / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": {"flwr": {"app": parts}}}))
    changed = {"site-0001": {"warm": False}, "site-0002": {"apps": "any"}}
    try:
        _change(federation, {name: {**one} for name, one in changed.items()})
        assert '"success": true' in flwr(federation / SERVER, "run", str(app), CONNECTION, "--format", "json")
        until(out.exists, "the app did not come to its end")
        there = {name for name in sites_of(federation) if (federation / name / "foreign-was-here").exists()}
        assert there == {"site-0002"}, out.read_text()
        assert len(out.read_text().splitlines()) == 3 and out.read_text().splitlines().count("done") == 1
        assert not list((federation / "site-0000" / "flwr").glob("apps/*nobody*"))
    finally:
        _change(federation, {"site-0001": {"warm": True}, "site-0002": {"apps": ""}})


def _change(federation: Path, sheets: dict[str, dict[str, Any]]) -> None:
    """Have nodes go on with other keys in their sheets."""
    for name, keys in sheets.items():
        local.stop(federation / name)
        path = federation / name / SITE
        write(path, replace(read(SiteSheet, path), **keys))
    local.up(federation, 3)


def test_a_site_sees_that_a_server_obeys_whoever_reaches_it(federation: Path, tmp_path: Path):
    """Flower's own SuperLink, with the certificate of the server, at the address of the sheet."""
    home, there = federation / SERVER, free_port()
    shutil.copytree(federation / "site-0000", tmp_path / "site", ignore=shutil.ignore_patterns("running.*", "*.socket"))
    sheet = read(SiteSheet, tmp_path / "site" / SITE)
    write(tmp_path / "site" / SITE, replace(sheet, superlink=f"{HERE}:{there}"))
    words = [str(BIN / "flower-superlink"), "--host", HERE, "--port", str(there), "--enable-supernode-auth"]
    words += ["--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key", "--ssl-ca-certfile", "ca.crt"]
    with (tmp_path / "log").open("wb") as log:
        stock = subprocess.Popen(words, cwd=home, env=environment(), stdout=log, stderr=log)
        try:
            until(lambda: answer(HERE, there, "/health", "GET") == 200, "Flower's SuperLink did not start")
            assert "anyone who reaches it can control it" in check(tmp_path / "site")[-1][2]
        finally:
            stock.terminate()
            stock.wait()


def test_a_proxy_is_not_asked_for_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing listens there; and a SOCKS proxy, which Flower's programs cannot go by, keeps none from starting."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://someone:secret@127.0.0.1:9")
    folder = tmp_path / "proxied"
    try:
        assert local.up(folder, 1) == ["site-0000"]
        command = [sys.executable, "-m", "fedloom.sims.cli", "doctor", "--federation", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "proxy" in done.stdout and "secret" not in done.stdout, done.stdout
    finally:
        local.down(folder)
