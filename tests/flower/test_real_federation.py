"""A real federation: SuperLink, SuperNodes and `flwr run`, each a process of its own, against the inline engine."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf import load
from server.experiment import run_experiment
from server.ledger import Ledger
from server.listener import LogListener
from sims.engines import open_engine

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SMALL = ["rounds=2", "sites.0.samples=100", "sites.1.samples=100", "data.size=8", "baselines=[]", "seed=3"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def process(log: Path, environment: dict[str, str], *words: str) -> Iterator[None]:
    """A program of the environment in a process group of its own, stopped with all its children at the end."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            [str(BIN / words[0]), *words[1:]],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=log.parent,
        )
        try:
            yield
        finally:
            for kind in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, kind)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=10)


def wait_for(port: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens on port {port}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flwr_run_gives_the_bits_of_the_inline_engine(tmp_path: Path):
    with open_engine(load("digits", [*SMALL, "engine.name=inline", f"run.root={tmp_path}", "run.name=inline"])) as grid:
        config = load("digits", [*SMALL, "engine.name=inline", f"run.root={tmp_path}", "run.name=inline"])
        expected = run_experiment(grid, config, LogListener())

    home = tmp_path / "flwr"
    home.mkdir()
    port = free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    with contextlib.ExitStack() as stack:

        def start(name: str, *words: str) -> None:
            stack.enter_context(process(tmp_path / f"{name}.log", environment, *words))

        start("superlink", "flower-superlink", "--insecure", "--port", str(port))
        wait_for(port)
        for number, place in enumerate((0, 1, 1)):  # the last one says that it is site-0001, too
            node = f'partition-id={place} store="{tmp_path}/node-{number}"'
            start(
                f"node-{number}",
                *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())),
                *("--node-config", node),
            )

        def flwr_run(*words: str) -> str:
            overrides = " ".join([*SMALL, f"run.root={tmp_path}", "run.name=flower", *words])
            run = [str(BIN / "flwr"), "run", str(REPOSITORY), "here", "--stream"]
            done = subprocess.run(
                [*run, "--run-config", f'experiment="digits" overrides="{overrides}"'],
                env=environment,
                capture_output=True,
                text=True,
                timeout=400,
                cwd=tmp_path,
            )
            return done.stdout + done.stderr + (tmp_path / "superlink.log").read_text()

        log = flwr_run()
        path = tmp_path / "flower" / "summary.json"
        assert path.is_file(), log
        summary = json.loads(path.read_text())
        assert summary["status"] == "finished", log
        told = flwr_run()  # once more: the run exists
        log = flwr_run("run.name=there", "evaluation.where=sites")  # sites measure; the server reads no image
    assert summary["engine"] == "flower"
    assert summary["digest"] == expected["digest"]
    assert summary["accuracy"] == expected["accuracy"]
    there = json.loads((tmp_path / "there" / "summary.json").read_text())
    assert (there["status"], there["digest"]) == ("finished", expected["digest"]), log
    assert there["accuracy"] == expected["accuracy"]
    assert [site["samples"] for site in there["sites"]] == ["at the site"] * 2
    stores = [list(Path(tmp_path / f"node-{number}").rglob("*.safetensors")) for number in range(3)]
    assert stores[0] and bool(stores[1]) != bool(stores[2]), "a name is one node's, which keeps its state in its own store"
    with Ledger.open(tmp_path / "flower", server=False) as ledger:
        bound = ledger.bound()
    assert bound.keys() == {"site-0000", "site-0001"} and len(set(bound.values())) == 2
    assert "RunFailed: the run 'flower' exists" in told
    assert "Traceback" not in told, told
