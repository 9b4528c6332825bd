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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.clients.storage.states import read_state
from fedloom.conf import load
from fedloom.conf.loading import to_yaml
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run_folder.folder import CONFIG
from fedloom.sims.engines import open_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SMALL = ["sites.0.samples=100", "sites.1.samples=100", "data.size=8", "baselines=[]", "seed=3"]
PLACES = (0, 1, 1)  # of the nodes; the last one says that it is site-0001, too


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


@dataclass(frozen=True)
class Flower:
    """A SuperLink and its SuperNodes at work, and the folder of their logs, stores and runs."""

    root: Path
    environment: dict[str, str]

    def run(self, *words: str) -> str:
        """`flwr run` with these overrides; all that it and the SuperLink said."""
        overrides = " ".join([*SMALL, f"run.root={self.root}", *words])
        command = [str(BIN / "flwr"), "run", str(REPOSITORY), "here", "--stream"]
        done = subprocess.run(
            [*command, "--run-config", f'experiment="digits" overrides="{overrides}"'],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=400,
            cwd=self.root,
        )
        return done.stdout + done.stderr + (self.root / "superlink.log").read_text()

    def summary(self, name: str, log: str) -> dict[str, Any]:
        path = self.root / name / "summary.json"
        assert path.is_file(), log
        return json.loads(path.read_text())

    def holders(self, name: str) -> dict[str, list[int]]:
        """Which nodes keep a state of which of the run's sites."""
        with Ledger.open(self.root / name, server=False) as ledger:
            run, sites = ledger.run().run, ledger.sites()
        places = range(len(PLACES))
        return {site: [at for at in places if any((self.store(at) / run / site).glob("*"))] for site in sites}

    def store(self, place: int) -> Path:
        return self.root / f"node-{place}"


def environment_of(home: Path, port: int) -> dict[str, str]:
    """That of Flower's programs, which find the SuperLink under the name `here`."""
    home.mkdir()
    here = f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n{here}')
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    root, port = tmp_path_factory.mktemp("federation"), free_port()
    flower = Flower(root, environment_of(root / "flwr", port))
    with contextlib.ExitStack() as stack:

        def start(name: str, *words: str) -> None:
            stack.enter_context(process(root / f"{name}.log", flower.environment, *words))

        start("superlink", "flower-superlink", "--insecure", "--port", str(port))
        wait_for(port)
        for number, place in enumerate(PLACES):
            start(
                f"node-{number}",
                *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())),
                *("--node-config", f'partition-id={place} store="{flower.store(number)}"'),
            )
        yield flower


def inline(root: Path, *words: str) -> dict[str, Any]:
    """The summary of the same run on the inline engine."""
    config = load("digits", [*SMALL, "engine.name=inline", f"run.root={root}", "run.name=inline", *words])
    with open_engine(config) as grid:
        return run_experiment(grid, config, LogListener())


def test_flwr_run_gives_the_bits_of_the_inline_engine(flower: Flower, tmp_path: Path):
    """And sites measure what the server would, which reads no image."""
    words = ["rounds=2", "evaluation.every=2", "evaluation.sites=0"]  # what is measured is a message to each site
    words += ["network.freeze=[extractor.0.*]", "training.epochs=0.5", "evaluation.keep=best", "stopping.patience=1"]
    expected = inline(tmp_path, *words)
    log = flower.run(*words, "run.name=flower", "evaluation.where=sites")
    summary = flower.summary("flower", log)
    assert (summary["status"], summary["engine"]) == ("finished", "flower"), log
    assert summary["digest"] == expected["digest"]
    assert summary["accuracy"] == expected["accuracy"]
    assert [site["samples"] for site in summary["sites"]] == ["at the site"] * 2
    folders = (flower.root / "flower", tmp_path / "inline")
    here, there = (read_state(folder / "states" / "best.safetensors") for folder in folders)
    assert summary["best"] == expected["best"] and all(torch.equal(here[name], there[name]) for name in here)
    holders = flower.holders("flower")
    assert holders["site-0000"] == [0] and holders["site-0001"] in ([1], [2])  # a name is one node's, the store its own
    with Ledger.open(flower.root / "flower", server=False) as ledger:
        bound = ledger.bound()
    assert bound.keys() == {"site-0000", "site-0001"} and len(set(bound.values())) == 2


def test_a_run_that_exists_is_refused_in_one_line(flower: Flower):
    (flower.root / "taken").mkdir()
    (flower.root / "taken" / CONFIG).write_text(to_yaml(load("digits")))
    output = flower.run("run.name=taken")
    assert "RunFailed: the run 'taken' exists" in output
    assert "Traceback" not in output, output
