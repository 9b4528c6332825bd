"""The desk: the host names under which it answers, by its certificate and behind a proxy."""

from pathlib import Path

import httpx
import pytest

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
