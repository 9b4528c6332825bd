"""The desk: the host names under which it answers, by its certificate and behind a proxy."""

import subprocess
from pathlib import Path

import httpx
import pytest

from tests.sims.commands import FEDLOOM, Command, refused
from tests.sims.desks import Folder, certificate, folder_with, free_port, served

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Folder:
    return folder_with(finished_run, tmp_path / "runs")


HOSTS = {
    "desk.example.org": 200, "DESK.example.org:443": 200, "xn--bro-hoa.example.org": 200, "localhost": 200,
    "example.org": 421, "a.desk.example.org": 421, ".example.org": 421, "*.example.org": 421, "desk.example.org.": 421,
    "desk.evil.org": 421, "desk.example.org.evil.org": 421, "a@b.example.org": 421, "example": 421, "desk.org": 421,
    "f1.part.example.net": 421, "f*.part.example.net": 421, "127.0.0.2": 421,
}  # fmt: skip


def test_a_wildcard_of_the_certificate_stands_for_one_left_most_label(folder: Folder, tmp_path: Path):
    wild = ["*.example.org", "*", "*.org", "f*.part.example.net", "a.*.example.net", "*.0.0.2"]
    cert, key = certificate(tmp_path, *wild)
    port = free_port()
    words = ["--host", "0.0.0.0", "--cert", str(cert), "--key", str(key)]
    with (
        served(folder, port, *words, scheme="https"),
        httpx.Client(base_url=f"https://localhost:{port}", verify=False) as client,
    ):
        said = {host: client.get("/health", headers={"Host": host}).status_code for host in HOSTS}
    assert said == HOSTS


def test_a_desk_behind_a_proxy_has_further_names_and_cookies_for_https_alone(folder: Folder):
    port = free_port()
    words = ["--host-name", "Desk.example.org", "--host-name", "privacy.example.org"]
    with served(folder, port, *words), httpx.Client(base_url=f"http://localhost:{port}") as client:
        for host in ("desk.example.org", "privacy.example.org:443", "localhost"):
            cookie = client.get("/login", headers={"Host": host}).headers["set-cookie"]
            assert cookie.startswith("__Host-desk=") and "Secure" in cookie
        assert client.get("/login", headers={"Host": "a.desk.example.org"}).status_code == 421


@pytest.mark.parametrize("name", ["", "https://desk.example.org", "desk.example.org:443", "*.example.org", "b\u00fcro.org"])
def test_a_further_name_is_a_plain_host_name(fedloom: Command, folder: Folder, name: str):
    refused(fedloom("serve", folder.root, "--host-name", "desk.example.org", "--host-name", name), "--host-name: got")


def test_a_key_with_a_pass_phrase_ends_the_desk_with_a_line(folder: Folder, tmp_path: Path):
    cert, key = certificate(tmp_path, phrase="secret")
    words = ["serve", str(folder.root), "--host", "0.0.0.0", "--cert", str(cert), "--key", str(key)]
    said = subprocess.run([FEDLOOM, *words], capture_output=True, text=True, timeout=100, start_new_session=True)
    assert said.returncode == 2 and said.stderr.strip().splitlines()[0].startswith(f"fedloom: {key}: has a pass phrase")
    assert len(said.stderr.strip().splitlines()) == 1
