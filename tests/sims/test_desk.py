"""The desk's pages and its interface for programs: what each role may do, and what becomes of a request."""

import html
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.unlearning.certificate import read
from fedloom.sims.desk import limits
from fedloom.sims.desk.audit import Audit
from fedloom.sims.desk.rendering import for_people
from tests.sims.commands import ONE, TWO, Command, refused
from tests.sims.desks import API, Folder, browser, csrf_of, folder_with, free_port, served, until

pytestmark = pytest.mark.usefixtures("blank_pictures")

RUN = f"{API}/runs/digits"
READ = ["/runs", "/runs/digits", "/runs/digits/rounds", "/runs/digits/sites", f"/runs/digits/sites/{ONE}",
        "/runs/digits/events", "/runs/digits/chain", "/runs/digits/requests", "/runs/digits/certificates",
        "/me"]  # fmt: skip
PAGES = ["/", "/requests", "/compare", "/compare?one=digits&other=digits", "/runs/digits", f"/runs/digits/sites/{ONE}",
         "/runs/digits/requests", "/runs/digits/certificates", "/runs/digits/events"]  # fmt: skip


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Folder:
    return folder_with(finished_run, tmp_path / "runs")


@pytest.fixture
def client(folder: Folder) -> Iterator[TestClient]:
    with browser(folder) as client:
        yield client


def test_a_run_that_is_removed_while_it_is_read_does_not_exist(
    client: TestClient, folder: Folder, monkeypatch: pytest.MonkeyPatch
):
    """Its folder goes between the look for the run and the read of its ledger."""
    opened = Ledger.open

    def late(path: Path, **more: bool) -> Ledger:
        shutil.rmtree(folder.run, ignore_errors=True)
        return opened(path, **more)

    spare = folder.root.parent / "spare"
    shutil.copytree(folder.run, spare)
    monkeypatch.setattr(Ledger, "open", late)
    for path in ("/sites", f"/sites/{ONE}", "/events", "/requests"):
        shutil.copytree(spare, folder.run, dirs_exist_ok=True)
        said = client.get(f"{RUN}{path}", headers=folder.bearer("viewer"))
        assert (said.status_code, said.json()) == (404, {"error": "This run does not exist."}), path
    shutil.copytree(spare, folder.run, dirs_exist_ok=True)
    assert ask(client, folder, "operator").status_code == 404
    assert client.get(f"{API}/runs", headers=folder.bearer("viewer")).json() == []


def ask(client: TestClient, folder: Folder, role: str, key: str = "", site: str = ONE, **more: object) -> httpx.Response:
    headers = folder.bearer(role) | ({"Idempotency-Key": key} if key else {})
    return client.post(f"{RUN}/requests", headers=headers, json={"sites": [site], **more})


@pytest.mark.parametrize("path", READ)
def test_only_a_token_reads(client: TestClient, folder: Folder, path: str):
    for role in folder.secrets:
        assert client.get(f"{API}{path}", headers=folder.bearer(role)).status_code == 200
    for headers in ({}, {"Authorization": "Bearer fedloom_wrong"}, {"Authorization": "Basic eDp5"}):
        said = client.get(f"{API}{path}", headers=headers)
        assert said.status_code == 401 and said.headers["www-authenticate"] == "Bearer" and "digits" not in said.text


@pytest.mark.parametrize("path", PAGES)
def test_pages_are_for_those_who_have_logged_in(folder: Folder, path: str):
    said = browser(folder).get(path, follow_redirects=False)
    assert said.status_code == 303 and said.headers["location"].startswith("/login")
    for role in folder.secrets:
        assert browser(folder, role).get(path).status_code == 200


@pytest.mark.parametrize(
    ("role", "site", "status"),
    [("viewer", ONE, 403), ("requester", ONE, 202), ("requester", TWO, 403), ("operator", TWO, 202), ("", ONE, 401)],
)
def test_who_may_ask_to_forget_what(client: TestClient, folder: Folder, role: str, site: str, status: int):
    said = ask(client, folder, role, site=site)
    assert said.status_code == status
    if (role, status) == ("requester", 403):
        assert said.json()["error"] == f"The token 'requester' (requester for {ONE}) does not allow this."
    with Ledger.open(folder.run, server=False) as ledger:
        assert [(one.sites, one.by) for one in ledger.requests()] == ([((site,), role)] if status == 202 else [])
    if status == 403:
        assert (Audit(folder.root).newest(1)[0].kind, Audit(folder.root).newest(1)[0].body["by"]) == ("refused", role)
    assert check(folder.run) == []


@pytest.mark.parametrize(("by", "role", "status"), [
    ("operator", "viewer", 403), ("operator", "requester", 403), ("operator", "operator", 200),
    ("requester", "requester", 200), ("requester", "viewer", 403), ("requester", "operator", 200)])  # fmt: skip
def test_who_may_cancel_what(client: TestClient, folder: Folder, by: str, role: str, status: int):
    assert ask(client, folder, by, "r1").status_code == 202
    assert client.delete(f"{RUN}/requests/r1", headers=folder.bearer(role)).status_code == status
    state = client.get(f"{RUN}/requests/r1", headers=folder.bearer("viewer")).json()["state"]
    assert state == ("cancelled" if status == 200 else "received")
    if status == 200:
        again = client.delete(f"{RUN}/requests/r1", headers=folder.bearer(role))
        assert again.status_code == 409 and again.json() == {"error": f"request 'r1': is already cancelled, by {role}"}
    assert check(folder.run) == []


@pytest.mark.parametrize("role", ["viewer", "requester"])
def test_the_audit_record_is_for_operators(folder: Folder, role: str):
    assert browser(folder, role).get("/audit").status_code == 403
    said = browser(folder, "operator").get("/audit")
    assert said.status_code == 200 and "unbroken" in said.text and f"by</b> {role}" not in said.text


def test_the_same_key_is_the_same_request(client: TestClient, folder: Folder):
    first = ask(client, folder, "operator", "2026-17", reason="consent withdrawn", repair=2)
    again = ask(client, folder, "operator", "2026-17", reason="consent withdrawn", repair=2)
    assert first.status_code == again.status_code == 202 and first.json() == again.json()
    assert first.json()["id"] == "2026-17" and first.json()["options"] == {"repair": 2}
    for changed in ({"reason": "another", "repair": 2}, {"reason": "consent withdrawn"}, {"site": TWO}):
        assert ask(client, folder, "operator", "2026-17", **changed).status_code == 409
    assert len(client.get(f"{RUN}/requests", headers=folder.bearer("viewer")).json()) == 1


@pytest.mark.parametrize(("body", "reason"), [
    ({"sites": []}, "at least 1 item"), ({"sites": ["site-9"]}, "unknown site"), ({"sites": [ONE, ONE]}, "named twice"),
    ({"sites": [ONE], "repair": -1}, "repair"), ({"sites": [ONE], "repair": 10**9}, "repair"), ({}, "sites"),
    ({"sites": [ONE], "by": "ceo"}, "by"), ({"sites": [ONE], "reason": "x" * 3000}, "reason"),
    ({"sites": ["site-0000", ONE, TWO]}, "no site would be left")])  # fmt: skip
def test_bad_requests_are_refused_with_the_reason(client: TestClient, folder: Folder, body: dict, reason: str):
    said = client.post(f"{RUN}/requests", headers=folder.bearer("operator"), json=body)
    assert said.status_code == 422 and reason in said.json()["error"], said.text
    assert str(folder.root) not in said.text
    assert client.get(f"{RUN}/requests", headers=folder.bearer("viewer")).json() == []


def test_a_request_through_the_pages_is_fulfilled_by_the_runs_server(fedloom: Command, folder: Folder):
    client = browser(folder, "requester")
    form = client.get(f"/runs/digits/ask?site={ONE}").text
    assert f'value="{ONE}" checked' in form and TWO not in form  # sites of this token alone
    fields = {"csrf": csrf_of(client, "/runs/digits/ask"), "site": ONE, "reason": "by letter", "repair": "0"}
    seen = client.post("/runs/digits/ask", data=fields).text
    for words in ("Nothing is sent yet", "What is exact", "What is not exact", "fedloom resume", "cannot be undone"):
        assert words in seen
    none = client.post("/runs/digits/ask", data={name: text for name, text in fields.items() if name != "site"})
    assert none.status_code == 422 and "Choose at least one site" in none.text
    with Ledger.open(folder.run, server=False) as ledger:
        assert ledger.requests() == []
    said = client.post("/runs/digits/requests", data={**fields, "id": "letter-1"})
    assert said.url.path == "/runs/digits/requests/letter-1" and "Cancel the request" in said.text
    assert "1 open" in client.get("/").text

    assert fedloom("resume", folder.run, "--quiet").code == 0
    shown = client.get("/runs/digits/requests/letter-1").text
    assert "verified" in shown and "Cancel the request" not in shown
    certificate = client.get("/runs/digits/certificates/letter-1/file")
    assert certificate.headers["content-disposition"] == 'attachment; filename="letter-1.json"'
    assert certificate.json() == read(folder.run / "certificates" / "letter-1.json")
    assert certificate.json()["by"] == "requester"
    page = client.get("/runs/digits/certificates/letter-1").text
    assert "What is not exact" in page and "unchanged" in page
    file = folder.run / "certificates" / "letter-1.json"
    written = file.read_text()
    file.write_text(written.replace("by letter", "by lettex"))
    for path in ("/runs/digits/certificates", "/runs/digits/certificates/letter-1"):
        assert 'class="badge changed"' in client.get(path).text
    file.write_text(written)
    assert client.get("/runs/digits/certificates/letter-1/signature").json()["key"].startswith("ssh-ed25519")
    assert Audit(folder.root).newest(1)[0].body == {"by": "requester", "run": "digits", "file": "letter-1.sig"}
    assert f"Already forgotten: {ONE}" in client.get("/runs/digits/ask").text.split("<main")[1]

    proof = client.get("/runs/digits/certificates/letter-1/proof")
    assert proof.headers["content-disposition"] == 'attachment; filename="proof-letter-1.zip"'
    assert proof.content == client.get(f"{RUN}/certificates/letter-1/proof", headers=folder.bearer("viewer")).content
    with zipfile.ZipFile(io.BytesIO(proof.content)) as archive:
        assert json.loads(archive.read("certificate.json")) == certificate.json()
        archive.extractall(folder.root.parent / "proof")
    assert (
        subprocess.run([sys.executable, "-I", folder.root.parent / "proof/verify.py"], capture_output=True).returncode == 0
    )
    assert Audit(folder.root).newest(1)[0].body == {"by": "viewer", "run": "digits", "file": "proof-letter-1.zip"}
    (folder.run / "certificates/letter-1.sig").write_text("{}")
    said = client.get("/runs/digits/certificates/letter-1/proof")
    assert said.status_code < 500 and "is not a signature" in said.text and str(folder.root) not in said.text
    (folder.run / "certificates/letter-1.sig").unlink()
    assert client.get("/runs/digits/certificates/letter-1/proof").status_code == 404


def test_numbers_for_prometheus(client: TestClient, folder: Folder):
    ask(client, folder, "operator", "r1")
    with (folder.run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"round": 3, "replies": 2, "dropped": {ONE: 'after 1.5 s: "x"\n', TWO: 'after 7 s: "x"\n'}}) + "\n"
        )
    said = client.get("/metrics", headers=folder.bearer("viewer"))
    lines = dict(line.rsplit(" ", 1) for line in said.text.splitlines() if not line.startswith("#"))
    assert lines['fedloom_requests_open{run="digits"}'] == "1"
    assert 0 < float(lines['fedloom_oldest_request_seconds{run="digits"}']) < 600
    assert lines['fedloom_replies_total{run="digits"}'] == "8"
    assert lines[r'fedloom_dropped_replies_total{run="digits",reason="after N s: \"x\"\n"}'] == "2"
    assert client.get("/metrics").status_code == 401
    assert client.get("/health").json() == {"status": "ok"}


def test_the_interface_describes_itself(client: TestClient):
    found = client.get(f"{API}/openapi.json").json()
    assert f"{API}/runs/{{run}}/requests" in found["paths"] and found["components"]["securitySchemes"]
    assert all(path.startswith(API) for path in found["paths"])
    assert client.get("/docs").status_code == 404


def test_too_many_acts_are_refused(client: TestClient, folder: Folder, monkeypatch: pytest.MonkeyPatch):
    client.app.state.desk.gate.acts = limits.RateLimit(burst=2, per_minute=0.1)  # type: ignore[attr-defined]
    assert [ask(client, folder, "operator", key).status_code for key in ("r1", "r2", "r3")] == [202, 202, 429]
    assert ask(client, folder, "requester", "r4").status_code == 409  # another's limit is its own


def test_a_damaged_run_does_not_hide_the_others(folder: Folder):
    (folder.root / "broken").mkdir()
    (folder.root / "broken" / "config.yaml").write_bytes((folder.run / "config.yaml").read_bytes())
    (folder.root / "broken" / "ledger.sqlite").write_bytes(b"no ledger")
    client = browser(folder, "viewer")
    assert "digits" in client.get("/").text
    for page in ("", "/requests", "/events", "/certificates", f"/sites/{ONE}"):
        assert client.get(f"/runs/broken{page}").status_code in (200, 404, 409), page


def test_a_run_whose_name_is_not_utf8_is_named_and_hides_no_other(folder: Folder):
    other = folder.root / os.fsdecode(b"\xff\xfe")
    other.mkdir()
    for name in ("config.yaml", "summary.json", "metrics.jsonl", "ledger.sqlite"):
        shutil.copy(folder.run / name, other / name)
    client, bearer = browser(folder, "viewer"), folder.bearer("viewer")
    assert [run["id"] for run in client.get(f"{API}/runs", headers=bearer).json()] == ["digits"]
    assert r"\xff\xfe: its name is not valid UTF-8; rename the folder" in html.unescape(client.get("/").text)
    for path in ("/metrics", "/requests", "/compare"):
        assert client.get(path, headers=bearer).status_code == 200, path


def test_a_run_with_a_damaged_configuration_is_named(folder: Folder):
    (folder.root / "broken").mkdir()
    (folder.root / "broken" / "ledger.sqlite").write_bytes(b"")
    (folder.root / "broken" / "config.yaml").write_text("name: [")
    page = browser(folder, "viewer").get("/").text
    assert "digits" in page and "broken/config.yaml: is not valid YAML (line 1)" in page
    assert str(folder.root) not in page


@pytest.mark.parametrize(("words", "reason"), [
    (["--host", "0.0.0.0"], "--cert and --key"), (["--host", "example.org"], "--cert and --key"),
    (["--cert", "x.pem"], "name both"), (["--cert", "x.pem", "--key", "y.pem"], "cannot be used"),
    (["--webhook", "https://x.example"], "--webhook-secret-file")])  # fmt: skip
def test_the_desk_does_not_start_without_what_it_needs(fedloom: Command, folder: Folder, words: list[str], reason: str):
    said = fedloom("serve", folder.root, *words)
    refused(said, reason)


def test_tokens_on_the_command_line(fedloom: Command, folder: Folder):
    said = fedloom(
        "serve", folder.root, "token", "--role", "requester", "--name", "dpo", "--sites", f"{ONE},{TWO}", "--days", 1
    )
    assert said.code == 0 and said.out.startswith("fedloom_")
    listed = json.loads(fedloom("serve", folder.root, "tokens", "--json").out)["tokens"]
    assert [one["name"] for one in listed] == [*folder.secrets, "dpo"] and listed[-1]["sites"] == f"{ONE}, {TWO}"
    refused(fedloom("serve", folder.root, "token", "--role", "requester", "--name", "x"), "--sites")
    refused(fedloom("serve", folder.run, "token", "--role", "viewer", "--name", "x"), "is a run")
    refused(fedloom("serve", folder.root, "token", "--role", "admin", "--name", "x"), "unknown role 'admin'")
    for name in ("dpo", "DPO"):  # requests and the audit record name it
        refused(fedloom("serve", folder.root, "token", "--role", "viewer", "--name", name), "'dpo' has or had a token")
    refused(fedloom("serve", folder.root, "revoke", "dpa"), "did you mean 'dpo'")
    assert fedloom("serve", folder.root, "revoke", "dpo").code == 0
    assert "revoked" in fedloom("serve", folder.root, "tokens").out


def test_other_commands_do_not_load_the_desk():
    code = "import sys, fedloom.sims.cli.main; print(sys.modules.keys() & {'fastapi', 'uvicorn', 'jinja2'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_a_killed_desk_loses_no_request(fedloom: Command, folder: Folder):
    port = free_port()
    with served(folder, port) as desk:
        url = f"http://localhost:{port}{RUN}/requests"
        for key, site in (("r1", ONE), ("r2", TWO)):
            said = httpx.post(url, headers={**folder.bearer("operator"), "Idempotency-Key": key}, json={"sites": [site]})
            assert said.status_code == 202
        desk.kill()
    assert check(folder.run) == []
    assert fedloom("resume", folder.run, "--quiet").code == 0
    with served(folder, port):
        found = httpx.get(url, headers=folder.bearer("viewer")).json()
    assert [(one["id"], one["state"], one["by"]) for one in found] == [
        ("r1", "verified", "operator"), ("r2", "verified", "operator")]  # fmt: skip
    assert check(folder.run) == []


def test_a_page_hears_that_its_run_has_changed(folder: Folder):
    port = free_port()
    with served(folder, port), httpx.Client(base_url=f"http://localhost:{port}", timeout=30) as client:
        token = csrf_of(client, "/login")
        assert client.post("/login", data={"csrf": token, "token": folder.secrets["viewer"]}).status_code == 303
        with client.stream("GET", "/runs/digits/live") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.iter_lines()
            assert next(lines).startswith("retry")
            with Ledger.open(folder.run, server=False) as ledger:
                ledger.receive("r1", "unlearn", [ONE], "", {})
            assert "event: change" in lines
        assert client.get("/runs/nowhere/live").status_code == 404


def test_the_desk_stops_at_once_while_pages_follow_runs(folder: Folder):
    port = free_port()
    with served(folder, port) as desk, httpx.Client(base_url=f"http://localhost:{port}", timeout=30) as client:
        client.post("/login", data={"csrf": csrf_of(client, "/login"), "token": folder.secrets["viewer"]})
        with client.stream("GET", "/runs/digits/live") as answer:
            next(answer.iter_lines())
            desk.terminate()
            until(lambda: desk.poll() is not None, "the desk has stopped", 10)


def test_a_page_that_fails_says_what_to_do_in_the_browser(folder: Folder):
    client = browser(folder, "operator")
    (folder.run / "config.yaml").rename(folder.run / "config.txt")
    said = client.get("/runs/digits")
    assert said.status_code == 404 and "Start again from the list of all runs." in said.text
    (folder.run / "config.txt").rename(folder.run / "config.yaml")
    (folder.run / "ledger.sqlite").write_bytes(b"damaged " * 1000)
    said = client.get("/runs/digits/requests")
    assert said.status_code == 409 and "Reload the run&#39;s page" in said.text and "fedloom " not in said.text


@pytest.mark.parametrize(
    ("text", "people"),
    [
        ("the site 'a' is already forgotten; `fedloom requests RUN` shows the request", "the site 'a' is already forgotten"),
        ("x.json: another key has signed it; set FEDLOOM_KEY to the file", "x.json: another key has signed it"),
        ("Nothing is forgotten yet. --without-data forgets without measuring", "Nothing is forgotten yet."),
        ("run 'fedloom resume RUN'", "This is not possible now."),
        ("Choose at least one site.", "Choose at least one site."),
        ("It is open. Wait for it; or cancel it. Then ask.", "It is open. Wait for it; or cancel it. Then ask."),
        ("It waits; `fedloom resume RUN` continues it. Try later.", "It waits. Try later."),
        ("a.json: is damaged; restore it from a copy; ask again", "a.json: is damaged; ask again"),
    ],
)
def test_commands_are_no_help_in_a_browser(text: str, people: str):
    assert for_people(text) == people


def test_times_have_seconds_and_the_box_of_facts_only_what_is_known(fedloom: Command, folder: Folder):
    client = browser(folder, "operator")
    assert "Validation accuracy</dt>" in client.get("/runs/digits").text
    assert fedloom("unlearn", folder.run, ONE, "--request-id", "r1").code == 0
    page = client.get("/runs/digits").text
    assert "Validation accuracy</dt>" not in page and "Test accuracy</dt>" in page
    received = read(folder.run / "certificates" / "r1.json")["times"]["received"]
    assert f"{received[:10]} {received[11:19]} UTC" in client.get("/runs/digits/requests/r1").text
