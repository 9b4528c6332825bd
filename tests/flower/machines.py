"""Parts of the tests of real federations: runs over one, and what its machines are doing."""

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
from fedloom.sims.engines import open_engine
from fedloom.sims.federation.machines import nodes
from fedloom.sims.federation.plan import SERVER
from fedloom.sims.federation.programs import PID

SITES = "sites=[{domain: digits, samples: 60}, {domain: digits, samples: 60}, {domain: digits, samples: 60}]"
SMALL = [SITES, "data.size=8", "data.test_limit=50", "baselines=[]", "seed=3", "training.epochs=1"]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def fedloom(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedloom.sims.cli", *words]
    return subprocess.run(command, cwd=root, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


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
        time.sleep(max(0.2, 2 * (time.monotonic() - begin)))
        begin = time.monotonic()


def rounds(path: Path) -> int:
    file = path / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def online(federation: Path) -> set[str]:
    return {one["node-id"] for one in nodes(federation / SERVER) if one["status"] == "online"}


def program(folder: Path) -> int:
    """The process of Flower's own program in a machine's folder."""
    return int((folder / PID).read_text().split()[1])
