"""Parts of the tests of real federations: runs over one, and what its machines are doing."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.conf import load
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.cli import main as cli
from fedloom.sims.engines import open_engine
from fedloom.sims.federation.control import nodes
from fedloom.sims.federation.plan import FLOWER, SERVER
from fedloom.sims.federation.programs import BIN, HOME, PID, environment
from fedloom.sims.federation.proxies import without

SITES = "sites=[{domain: digits, samples: 60}, {domain: digits, samples: 60}, {domain: digits, samples: 60}]"
FEW_PARTS = "network={name: mlp, widths: [32]}"  # each part of a message is a request
CONVOLUTIONS = "network={name: conv6, standardise: true, affine: false}"  # the experiment's own, all of whose weights change
SMALL = [SITES, "data.size=8", "data.test_limit=50", "baselines=[]", "seed=3", "training.epochs=1", FEW_PARTS,
         "evaluation.sites=0"]  # fmt: skip  # to measure single sites takes one more question
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def fedloom(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in this process, in a folder: main, but for its handlers of signals."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        before, sys.argv = sys.argv, ["fedloom", *words]
        try:
            code = cli._guarded()
        finally:
            sys.argv = before
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


def flwr(server: Path, *words: str) -> str:
    """What a command of Flower says of the SuperLink of a server's folder."""
    more = without(environment({HOME: str(server / FLOWER)}))
    command = [str(BIN / "flwr"), *words]
    done = subprocess.run(command, env=more, cwd=server, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def words(federation: Path, root: Path, name: str, *more: str) -> list[str]:
    return [*SMALL, "engine.name=flower", f"engine.address={federation}", f"run.root={root}", f"run.name={name}", *more]


def run(federation: Path, root: Path, name: str, *more: str) -> dict[str, Any]:
    done = fedloom(root, "run", "digits", *words(federation, root, name, *more), "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((root / name / "summary.json").read_text())


def inline(root: Path, *more: str) -> dict[str, Any]:
    config = load("digits", [*SMALL, "engine.name=inline", f"run.root={root}", "run.name=inline", *more])
    with open_engine(config) as grid:
        return run_experiment(grid, config, LogListener())


def until(there: Callable[[], Any], what: str, seconds: float = 150.0) -> None:
    """Wait until `there()` holds. A look that takes long leaves the machine to others for twice as long."""
    deadline, begin = time.monotonic() + seconds, time.monotonic()
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(max(0.1, 2 * (time.monotonic() - begin)))
        begin = time.monotonic()


def rounds(path: Path) -> int:
    file = path / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def online(federation: Path) -> set[str]:
    return {id for id, status in nodes(federation / SERVER).items() if status == "online"}


def program(folder: Path) -> int:
    """The process of Flower's own program in a machine's folder."""
    return int((folder / PID).read_text().split()[1])
