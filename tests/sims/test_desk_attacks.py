"""An attacker at the desk: other sites' forms, markup, paths, stolen and guessed tokens, other hosts, floods."""

import contextlib
import json
import re
import shutil
import socket
from pathlib import Path

import httpx
import pytest

from fedloom.server.ledger import Ledger
from tests.sims.commands import ONE, TWO
from tests.sims.desks import API, Folder, browser, csrf_of, folder_with, free_port, log_in, served, until

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
MARKUP = re.compile(r"<script>|<img|onerror=alert\(2\)>")


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Folder:
    return folder_with(finished_run, tmp_path / "runs")


FORMS = ["/logout", "/runs/digits/ask", "/runs/digits/requests", "/runs/digits/requests/r1/cancel"]


@pytest.mark.parametrize("path", FORMS)
def test_a_form_of_another_page_is_refused(folder: Folder, path: str):
    client, other = browser(folder, "operator"), browser(folder, "operator")
    fields = {"site": ONE, "reason": "x", "id": "r1"}
    for csrf in ("", "0" * 64, csrf_of(other, "/")):
        said = client.post(path, data={**fields, "csrf": csrf})
        assert said.status_code == 403 and "load the page again" in said.text
    assert client.get("/").status_code == 200  # still logged in
    with Ledger.open(folder.run, server=False) as ledger:
        assert ledger.requests() == []


def test_logging_in_needs_the_desks_own_form(folder: Folder):
    client = browser(folder)
    assert client.post("/login", data={"token": folder.secrets["operator"]}).status_code == 403
    assert client.get("/", follow_redirects=False).status_code == 303


def test_a_session_is_new_and_its_cookie_is_out_of_reach_of_scripts_and_other_sites(folder: Folder):
    client = browser(folder)
    before = client.get("/login").cookies.get("desk") or client.cookies["desk"]
    said = client.post("/login", follow_redirects=False,
                       data={"csrf": csrf_of(client, "/login"), "token": folder.secrets["viewer"]})  # fmt: skip
    cookie = said.headers["set-cookie"]
    assert before not in cookie and "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert folder.secrets["viewer"] not in cookie
    client.cookies.set("desk", before)
    assert client.get("/", follow_redirects=False).status_code == 303  # the earlier cookie is not logged in


@pytest.mark.parametrize("next", ["//evil.example", "https://evil.example", "/\\evil.example", "/\n/evil", "javascript:x"])
def test_logging_in_leads_to_this_desk_alone(folder: Folder, next: str):
    client = browser(folder)
    fields = {"csrf": csrf_of(client, "/login"), "token": folder.secrets["viewer"], "next": next}
    said = client.post("/login", data=fields, follow_redirects=False)
    assert said.headers["location"] == "/"


def test_nothing_in_a_runs_files_is_markup(folder: Folder):
    path = folder.root / EVIL.replace("/", "")
    shutil.copytree(folder.run, path)
    record = {"round": 3, "replies": 1, "dropped": {ONE: EVIL, EVIL: "x"}, "accuracy": {EVIL: 0.5, "union": 0.5}}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    summary = json.loads((path / "summary.json").read_text())
    summary["sites"][1]["domain"] = summary["sites"][1]["part"] = summary["method"] = EVIL
    summary["traces"] = {EVIL: EVIL}
    (path / "summary.json").write_text(json.dumps(summary))
    with Ledger.open(path, server=False) as ledger:
        ledger.receive("r1", "unlearn", [ONE], EVIL, {"repair": EVIL}, EVIL)
    client = browser(folder, "operator")
    found = client.get(f"{API}/runs", headers=folder.bearer("viewer")).json()
    run = "/runs/" + next(one["id"] for one in found if one["id"] != "digits").replace("<", "%3C").replace(" ", "%20")
    pages = ["/", "/requests", "/compare", run, f"{run}/requests", f"{run}/requests/r1", f"{run}/events", f"{run}/ask",
             f"{run}/sites/{ONE}", f"{run}/sites/{EVIL}", f"/runs/digits?start={EVIL}", f"/login?next=/{EVIL}",
             f"/{EVIL}"]  # fmt: skip
    for page in pages:
        said = client.get(page)
        assert not MARKUP.search(said.text), page
    assert "&lt;script&gt;" in client.get(run).text and "&lt;script&gt;" in client.get(f"{run}/requests/r1").text
    review = client.post(f"{run}/ask", data={"csrf": csrf_of(client, run), "site": TWO, "reason": EVIL + '"'})
    assert review.status_code == 200 and not MARKUP.search(review.text) and "&lt;script&gt;" in review.text
    assert not MARKUP.search(client.get("/audit").text)


PATHS = ["..%2fdigits", "%2e%2e", "%2e%2e%2fsecret", "digits%2f..%2f..%2fsecret", "~1secret", "..~1secret",
         ".desk", "digits%00", "/etc", "digits~1baselines", "C:%5C", "digits/"]  # fmt: skip


@pytest.mark.parametrize("run", PATHS)
def test_a_run_is_looked_up_and_never_opened_as_a_path(folder: Folder, run: str):
    shutil.copytree(folder.run, folder.root.parent / "secret")
    client = browser(folder, "operator")
    for path in (f"/runs/{run}", f"/runs/{run}/certificates/tokens", f"{API}/runs/{run}/sites", f"/static/{run}"):
        said = client.get(path, headers=folder.bearer("operator"), follow_redirects=False)
        assert said.status_code in (307, 404), (path, said.status_code)


@pytest.mark.parametrize(
    "id", ["../config", "..%2fconfig", "../../.desk/tokens", "%2e%2e%2f%2e%2e%2f.desk%2ftokens", "r1", "*"]
)
def test_a_certificate_is_looked_up_by_a_known_request(folder: Folder, id: str):
    (folder.run / "certificates").mkdir(exist_ok=True)
    (folder.run / "certificates" / "r1.json").write_text("{}")  # the ledger knows no such request
    client = browser(folder, "operator")
    for end in ("", "/file", "/signature"):
        assert client.get(f"/runs/digits/certificates/{id}{end}").status_code == 404
    assert client.get(f"{API}/runs/digits/certificates/{id}", headers=folder.bearer("operator")).status_code == 404


@pytest.mark.parametrize("id", ["../../../secret", "link"])
def test_a_run_that_was_made_to_lead_elsewhere_gives_nothing_away(folder: Folder, id: str):
    secret = folder.root.parent / "secret.json"
    secret.write_text('{"secret": 1}')
    (folder.run / "certificates").mkdir(exist_ok=True)
    (folder.run / "certificates" / "link.json").symlink_to(secret)
    with Ledger.open(folder.run, server=False) as ledger:
        ledger.receive(id, "unlearn", [ONE], "", {})
    client = browser(folder, "operator")
    name = id.replace("/", "%2F")
    for path in (f"/runs/digits/certificates/{name}", f"/runs/digits/certificates/{name}/file"):
        said = client.get(path)
        assert said.status_code == 404 and "secret&" not in said.text
    assert client.get("/runs/digits/certificates").status_code == 200


def test_a_run_with_nonsense_in_its_files_breaks_no_list(folder: Folder):
    path = folder.root / "odd"
    shutil.copytree(folder.run, path)
    (path / "summary.json").write_text(
        json.dumps({"status": "finished", "per_site": 7, "unlearned": 3, "scores": [1], "sites": {}})
    )
    (path / "metrics.jsonl").write_text(
        '{"round": 1, "seconds": NaN, "bytes": 3, "dropped": [1], "accuracy": {"union": "x"}}\n'
    )
    client = browser(folder, "operator")
    assert {one["id"] for one in client.get(f"{API}/runs", headers=folder.bearer("viewer")).json()} >= {"digits"}
    assert client.get(f"{API}/runs/odd/rounds", headers=folder.bearer("viewer")).status_code == 200
    for page in ("/", "/requests", "/compare", "/metrics"):
        assert client.get(page, headers=folder.bearer("viewer")).status_code == 200


@pytest.mark.parametrize("key", ["../x", "a/b", "x" * 101, ".hidden", "a b", "a\u00e9"])
def test_a_requests_id_is_a_plain_name(folder: Folder, key: str):
    headers = {**folder.bearer("operator"), "Idempotency-Key": key.encode()}
    said = browser(folder).post(f"{API}/runs/digits/requests", headers=headers, json={"sites": [ONE]})  # type: ignore[arg-type]
    assert said.status_code == 422 and "request id" in said.text


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "localhost@evil.example", "", "127.0.0.1.nip.io"]
)
def test_other_host_names_are_not_served(folder: Folder, host: str):
    client = browser(folder)
    for path in ("/", "/health", "/static/desk.css", f"{API}/runs"):
        said = client.get(path, headers={"Host": host, **folder.bearer("operator")})
        assert said.status_code == 421 and "digits" not in said.text


@pytest.mark.parametrize(
    "path", ["/", "/login", "/health", "/nowhere", "/static/desk.js", f"{API}/runs", f"{API}/openapi.json"]
)
def test_every_answer_limits_what_a_browser_may_do(folder: Folder, path: str):
    said = browser(folder).get(path, follow_redirects=False)
    policy = said.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert said.headers["x-content-type-options"] == "nosniff" and said.headers["x-frame-options"] == "DENY"
    assert "access-control-allow-origin" not in said.headers


def test_pages_have_no_inline_scripts_and_styles_which_the_policy_would_block(folder: Folder):
    client = browser(folder, "operator")
    for page in ("/login", "/", "/runs/digits", "/runs/digits/ask"):
        text = client.get(page).text
        assert not re.search(
            r"<style|\sstyle=|\son[a-z]+=|javascript:|<script(?! src=\"/static/)|https?://(?!www\.w3\.org)", text
        )


def test_large_and_endless_bodies_are_refused(folder: Folder):
    client = browser(folder, "operator")
    assert client.post("/login", content=b"x" * 70_000).status_code == 413
    assert client.post("/login", content=(b"x" for _ in range(3))).status_code == 413  # chunked
    many = "&".join(f"site=s{number}" for number in range(5000))
    assert client.post("/runs/digits/ask", content=many).status_code == 403


def test_an_endless_head_ends_its_connection(folder: Folder):
    port = free_port()
    with served(folder, port), socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        with pytest.raises(OSError):
            line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"x: a\r\n" * 5_000_000)
        assert httpx.get(f"http://localhost:{port}/health", timeout=60).status_code == 200


def test_callers_that_never_end_their_heads_shut_no_one_out(folder: Folder):
    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):  # a busy machine answers late
            return httpx.get(url, headers=operator).status_code == 200
        return False

    port = free_port()
    with served(folder, port), contextlib.ExitStack() as stack:
        client = stack.enter_context(
            httpx.Client(base_url=f"http://localhost:{port}", headers=folder.bearer("viewer"), timeout=60)
        )
        assert client.get(f"{API}/me").status_code == 200  # its connection is its token's from here on
        with client.stream("GET", f"{API}/me"):
            for _ in range(800):
                line = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                line.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        url, operator = f"http://localhost:{port}{API}/me", folder.bearer("operator")
        until(answers, "another caller gets an answer", 60)
        assert client.get(f"{API}/me").status_code == 200


def test_a_token_has_few_sessions_and_ends_no_session_of_another(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedloom.sims.desk.sessions.MOST_SESSIONS", 40)
    app = browser(folder).app
    operator, first = (browser(folder, app=app) for _ in range(2))
    log_in(operator, folder.secrets["operator"])
    others = [first, *(browser(folder, app=app) for _ in range(45))]
    for client in others:
        log_in(client, folder.secrets["viewer"])

    def is_in(client: httpx.Client) -> bool:
        return client.get("/", follow_redirects=False).status_code == 200

    assert is_in(operator) and [is_in(client) for client in others] == [False] * 26 + [True] * 20


def test_log_ins_and_downloads_count_as_acts_of_their_token(folder: Folder):
    client = browser(folder)
    with Ledger.open(folder.run, server=False) as ledger:
        ledger.receive("r1", "unlearn", [ONE], "", {})
    (folder.run / "certificates").mkdir(exist_ok=True)
    (folder.run / "certificates" / "r1.json").write_text("{}")
    codes = [
        client.get(f"{API}/runs/digits/certificates/r1", headers=folder.bearer("viewer")).status_code for _ in range(70)
    ]
    assert codes[:60] == [200] * 60 and codes[-1] == 429
    assert log_in(client, folder.secrets["viewer"]).status_code == 429
    assert log_in(client, folder.secrets["operator"]).status_code == 200


def test_a_token_follows_few_runs_at_once(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    client = browser(folder, "viewer")
    monkeypatch.setattr("fedloom.sims.desk.pages.streams", dict.fromkeys(range(20), "viewer"))
    assert client.get("/runs/digits/live").status_code == 503
    monkeypatch.setattr("fedloom.sims.desk.pages.streams", dict.fromkeys(range(20), "operator"))
    client.app.state.stopping = lambda: True  # type: ignore[attr-defined]
    assert client.get("/runs/digits/live").status_code == 200
