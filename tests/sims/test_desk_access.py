"""The desk: tokens, sessions, the audit record, webhooks, TLS, and many callers at once."""

import html
import json
import os
import re
import ssl
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import pytest

from fedloom.conf import UserError
from fedloom.server.ledger import Ledger
from fedloom.sims.desk import tokens as desk_tokens
from fedloom.sims.desk.audit import Audit
from fedloom.sims.desk.tokens import Tokens
from tests.sims.commands import ONE
from tests.sims.desks import API, Folder, browser, certificate, csrf_of, folder_with, free_port, log_in, served

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Folder:
    return folder_with(finished_run, tmp_path / "runs")


def test_tokens_are_stored_as_digests_in_a_file_of_their_owner(folder: Folder):
    path = folder.root / ".desk" / "tokens.json"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    text = path.read_text()
    assert not any(secret in text or secret.removeprefix("fedloom_") in text for secret in folder.secrets.values())
    os.chmod(path, 0o644)
    with pytest.raises(UserError, match="chmod 600"):
        Tokens(folder.root).all()


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_token_that_ends_ends_its_sessions(folder: Folder, how: str):
    client, bearer = browser(folder, "operator"), folder.bearer("operator")
    assert client.get(f"{API}/runs", headers=bearer).status_code == 200
    if how == "revoked":
        Tokens(folder.root).revoke("operator")
    else:
        path = folder.root / ".desk" / "tokens.json"
        rows = [
            {**row, "expires": (datetime.now(UTC) - timedelta(seconds=1)).isoformat()}
            for row in json.loads(path.read_text())
        ]
        path.write_text(json.dumps(rows))
    assert client.get("/", follow_redirects=False).status_code == 303
    assert client.get(f"{API}/runs", headers=bearer).status_code == 401


class Yesterday(datetime):
    """A clock that was set back by a day."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime.now(tz) - timedelta(days=1)


def test_a_clock_that_is_set_back_revives_no_token_and_extends_no_session(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    client, began, real = browser(folder, "operator"), time.monotonic(), time.time
    Tokens(folder.root).revoke("viewer")
    monkeypatch.setattr(desk_tokens, "datetime", Yesterday)
    monkeypatch.setattr(time, "time", lambda: real() - 24 * 3600)
    found = Tokens(folder.root)
    assert found.find(folder.secrets["viewer"]) is None and found.find(folder.secrets["operator"]) is not None
    assert client.get("/", follow_redirects=False).status_code == 200
    monkeypatch.setattr(time, "monotonic", lambda: began + 13 * 3600)
    assert client.get("/", follow_redirects=False).status_code == 303


def test_logging_out_ends_the_session_at_the_desk(folder: Folder):
    client = browser(folder, "viewer")
    cookie = client.cookies["desk"]
    client.post("/logout", data={"csrf": csrf_of(client, "/")})
    client.cookies.set("desk", cookie)
    assert client.get("/", follow_redirects=False).status_code == 303


def test_guessing_tokens_is_slowed_down_but_locks_no_one_out(folder: Folder):
    client = browser(folder)
    tried = [log_in(client, f"fedloom_{number}").status_code for number in range(14)]
    assert tried[:10] == [401] * 10 and set(tried[10:]) == {429}
    assert client.get(f"{API}/runs", headers={"Authorization": "Bearer x"}).status_code == 429
    assert client.get(f"{API}/runs", headers=folder.bearer("viewer")).status_code == 200
    assert [event.kind for event in Audit(folder.root).newest(20)] == ["wrong token"] * 10
    assert "fedloom_" not in (folder.root / ".desk" / "audit.jsonl").read_text()


def test_the_audit_record_shows_changes_and_outlives_a_torn_line(folder: Folder):
    audit = Audit(folder.root)
    for number in range(3):
        audit.note("logged in", f"user {number}")
    assert audit.problem() == ""
    whole = audit.path.read_bytes()
    for changed in (whole.replace(b"user 1", b"user 9"), b"".join(whole.splitlines(keepends=True)[1:])):
        audit.path.write_bytes(changed)
        assert audit.problem()
    audit.path.write_bytes(whole + b'[4, "torn')
    audit.note("logged in", "user 4")
    assert audit.newest(1)[0].body["by"] == "user 4" and "line 4" in audit.problem()


DAMAGED = ["[" * 200_000, "null", *({**{"name": "n", "role": "viewer", "sites": [], "sha256": "00", "created": "",
           "expires": "2099-01-01T00:00:00+00:00"}, **odd} for odd in (
    {"expires": 5}, {"expires": "never"}, {"expires": "2099-01-01T00:00:00"}, {"sha256": [1]}, {"role": "root"},
    {"role": []}, {"name": 7}, {"sites": "abc"}, {"sites": [1]}, {"x\n": 1}))]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_of_tokens_is_one_line(folder: Folder, content: object):
    client = browser(folder, "operator")
    path = folder.root / ".desk" / "tokens.json"
    path.write_text(content if isinstance(content, str) else json.dumps([content]))
    with pytest.raises(UserError, match="is damaged") as error:
        Tokens(folder.root).all()
    assert str(error.value).isprintable()
    for page in ("/", f"{API}/me"):
        assert "is damaged" in client.get(page, headers=folder.bearer("operator")).text


ODD_LINES = ["[" * 200_000, "5", "[]"] + [
    json.dumps([*line, "0" * 64, "0" * 64])
    for line in (
        ["4", "2026-01-01T00:00:00", "x", "{}"], [4, 5, "x", "{}"], [4, "2026", "x", "{}"], [4, "2026-01-01", ["x"], "{}"],
        [4, "2026-01-01", "x", "[1]"], [4, "2026-01-01", "x", '{"by": [[1]]}'], [4, "2026-01-01", "x", '{"by": NaN}'],
        [4, "2026-01-01", "x", "[" * 100_000], [4, "2026-01-01\ud80000:00:00", "\ud800", '{"by": "\\ud800"}'],
    )
]  # fmt: skip


@pytest.mark.parametrize("line", ODD_LINES, ids=range(len(ODD_LINES)))
def test_a_tampered_line_of_the_audit_record_is_shown_as_damage(folder: Folder, line: str):
    client, audit = browser(folder, "operator"), Audit(folder.root)
    lines = len(audit.path.read_bytes().splitlines())
    with audit.path.open("a") as file:
        file.write(f"{line}\n")
    said = client.get("/audit")
    assert said.status_code == 200 and f"line {lines + 1} is damaged" in said.text
    assert log_in(browser(folder), folder.secrets["operator"]).status_code == 200
    assert audit.newest(1)[0].kind == "logged in"


def test_other_machines_reach_the_desk_by_tls_alone(folder: Folder, tmp_path: Path):
    cert, key = certificate(tmp_path)
    port = free_port()
    with served(folder, port, "--host", "0.0.0.0", "--cert", str(cert), "--key", str(key), scheme="https"):
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=f"https://localhost:{port}", verify=context) as client:
            said = client.get("/login")
            assert "max-age" in said.headers["strict-transport-security"]
            cookie = said.headers["set-cookie"]
            assert cookie.startswith("__Host-desk=") and "Secure" in cookie and "Path=/" in cookie
            assert client.get("/health", headers={"Host": "desk.example"}).status_code == 200
            assert client.get("/health", headers={"Host": "evil.example"}).status_code == 421
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{port}/health")


def test_many_pages_and_requests_at_once_lose_nothing(folder: Folder):
    port = free_port()
    with served(folder, port), httpx.Client(base_url=f"http://localhost:{port}", timeout=60) as client:
        headers, url = folder.bearer("operator"), f"{API}/runs/digits/requests"

        def act(number: int) -> tuple[int, str]:
            if number % 2:
                said = client.get(url, headers=headers)
            else:
                key = {"Idempotency-Key": f"r{number // 4}"}  # each id is sent twice
                said = client.post(url, headers={**headers, **key}, json={"sites": [ONE]})
            return said.status_code, "" if said.is_success else said.text

        with ThreadPoolExecutor(80) as threads:
            assert Counter(threads.map(act, range(80))) == {(200, ""): 40, (202, ""): 40}
        assert len(client.get(url, headers=headers).json()) == 20


def test_a_requester_orders_no_training_and_no_second_request_for_a_site(folder: Folder):
    client, requests = browser(folder), f"{API}/runs/digits/requests"

    def asked(role: str, key: str, **options: object) -> int:
        headers = folder.bearer(role) | {"Idempotency-Key": key}
        return client.post(requests, headers=headers, json={"sites": [ONE], **options}).status_code

    assert [asked("requester", "a", **option) for option in ({"repair": 1}, {"rollback": True}, {"retrain": True})] == [
        403
    ] * 3
    assert [asked("requester", key) for key in ("a", "a", "b")] == [202, 202, 409]
    with Ledger.open(folder.run, server=False) as ledger:
        assert [request.id for request in ledger.requests()] == ["a"]
    assert client.delete(f"{requests}/a", headers=folder.bearer("requester")).status_code == 200
    assert asked("operator", "c", repair=1) == 202


def test_of_many_requests_at_once_for_a_site_one_counts(folder: Folder):
    client, requests = browser(folder), f"{API}/runs/digits/requests"

    def asked(key: int) -> int:
        headers = folder.bearer("requester") | {"Idempotency-Key": f"r{key}"}
        return client.post(requests, headers=headers, json={"sites": [ONE]}).status_code

    with client, ThreadPoolExecutor(12) as threads:  # one event loop, as in a server
        assert Counter(threads.map(asked, range(12))) == {202: 1, 409: 11}
    with Ledger.open(folder.run, server=False) as ledger:
        assert len(ledger.requests()) == 1


def test_a_name_belongs_to_its_first_token(folder: Folder):
    tokens = Tokens(folder.root)
    tokens.revoke("requester")
    with pytest.raises(UserError, match="has or had a token"):
        tokens.make("requester", "requester", [ONE])


def test_tokens_that_are_made_and_revoked_at_once_are_all_stored(tmp_path: Path):
    """Once a revocation was lost if another process made a token at that moment."""
    Tokens(tmp_path).make("bad", "viewer")
    with ThreadPoolExecutor(8) as threads:
        made = [threads.submit(Tokens(tmp_path).make, f"new-{number}", "viewer") for number in range(24)]
        threads.submit(Tokens(tmp_path).revoke, "bad").result()
        secrets = [each.result() for each in made]
    assert all(Tokens(tmp_path).find(secret) for secret in secrets)
    assert [token.name for token in Tokens(tmp_path).all().values() if not token.valid] == ["bad"]


def test_after_a_form_the_browser_is_sent_to_a_run_of_any_name(folder: Folder):
    odd = folder.run.rename(folder.root / "we ird?x#y").name
    client = browser(folder, "operator")
    fields = {"csrf": csrf_of(client, f"/runs/{quote(odd)}/ask"), "site": ONE, "id": "once"}
    sent = client.post(f"/runs/{quote(odd)}/requests", data=fields, follow_redirects=False)
    assert sent.status_code == 303
    assert client.get(sent.headers["location"]).status_code == 200
    client.cookies.clear()
    form = client.get(f"/runs/{quote(odd)}?start=1", follow_redirects=False).headers["location"]
    assert parse_qs(urlsplit(form).query) == {"next": [f"/runs/{quote(odd)}?start=1"]}


@pytest.mark.parametrize(
    "page", ["/runs/digits/events?before=9", "/runs/digits/ask?site=site-0001&x=%26%3D+%C3%A9#", "/?x=a//b"]
)
def test_after_a_log_in_the_browser_shows_the_page_that_was_asked_for(folder: Folder, page: str):
    client = browser(folder)
    form = client.get(page)
    fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form.text))
    fields = {name: html.unescape(value) for name, value in fields.items()}
    said = client.post("/login", data={**fields, "token": folder.secrets["operator"]})
    assert said.status_code == 200 and str(said.url) == f"http://localhost{page.rstrip('#')}"
