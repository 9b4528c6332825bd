"""Time stamps at the desk: an authority stamps downloaded proofs, and does not hold the desk if it hangs."""

import io
import logging
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedloom.sims.desk.audit import Audit
from tests.server.authorities import answering, authority_in, needs_openssl, openssl
from tests.sims.commands import ONE, Command
from tests.sims.desks import Folder, browser, folder_with

pytestmark = [pytest.mark.usefixtures("blank_pictures"), needs_openssl]

PROOF = "/runs/digits/certificates/letter-1/proof"


@pytest.fixture
def folder(fedloom: Command, finished_run: Path, tmp_path: Path) -> Folder:
    """A run that has forgotten a site."""
    made = folder_with(finished_run, tmp_path / "runs")
    assert fedloom("unlearn", made.run, ONE, "--request-id", "letter-1").code == 0
    return made


def test_an_authority_stamps_the_proofs_that_are_downloaded(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with answering(authority_in(tmp_path)) as url, browser(folder, "viewer", authority=url) as client:
        proof = client.get(PROOF)
    with zipfile.ZipFile(io.BytesIO(proof.content)) as archive:
        archive.extractall(tmp_path / "proof")
    words = ["ts", "-verify", "-in", "SHA256SUMS.tsr", "-data", "SHA256SUMS", "-CAfile", str(tmp_path / "tsa.pem")]
    assert "Verification: OK" in openssl(tmp_path / "proof", *words).stdout
    monkeypatch.setattr(logger := logging.getLogger("uvicorn.error"), "disabled", False)  # as other tests may leave it
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    with browser(folder, "viewer", authority=url) as client:  # nothing answers there
        said = client.get(PROOF)
    assert said.status_code == 502 and "authority gives no time stamp" in said.text and url not in said.text
    assert f"{url}: no answer" in caplog.text
    assert [line.kind for line in Audit(folder.root).newest(9)].count("downloaded") == 1


def test_an_authority_that_hangs_does_not_hold_the_desk(folder: Folder):
    goes_on, asked = threading.Event(), threading.Semaphore(0)

    def hang(query: bytes) -> bytes:
        asked.release()
        goes_on.wait(10)
        return b""

    with answering(hang) as url, browser(folder, "viewer", authority=url) as client, ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(client.get, PROOF) for _ in range(3)]
        assert all(asked.acquire(timeout=10) for _ in range(3))
        said = client.get(PROOF)
        assert said.status_code == 502 and "Other proofs wait" in said.text and client.get("/runs/digits").status_code == 200
        goes_on.set()
        assert {each.result().status_code for each in waiting} == {502}
