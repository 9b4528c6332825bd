"""Parts of the tests of resuming: runs that are stopped, go on, and all that they leave."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.clients.app import app
from fedloom.clients.storage.states import read_metadata
from fedloom.conf import Config
from fedloom.server.ledger import Ledger
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run_folder.folder import METRICS, SUMMARY
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, files, small


class Stopped(Exception):
    """What a listener raises to stop a run."""


class Stopper(Recorder):
    """A listener that stops the run, or its baseline of that name, after the commit of a round."""

    def __init__(self, after: int, baseline: str = "") -> None:
        super().__init__()
        self.after, self.baseline, self.at = after, baseline, ""

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self.at = Path(note).name

    def round_done(self, record: dict[str, Any]) -> None:
        super().round_done(record)
        if record["round"] == self.after and self.baseline in ("", self.at):
            raise Stopped


def configured(root: Path, *overrides: str) -> Config:
    return small(root, "rounds=4", "evaluation.every=2", *overrides, sites=3, samples=20)


def run(config: Config, listener: Recorder | None = None, client=app) -> dict[str, Any]:
    return run_experiment(InlineGrid(len(config.roster), store_folder(config), client), config, listener or Recorder())


def resumed(config: Config, listener: Recorder | None = None, client=app) -> dict[str, Any]:
    return run(dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True)), listener, client)


def stopped(config: Config, after: int, baseline: str = "") -> Config:
    """The configuration of a run that was stopped after that round."""
    with pytest.raises(Stopped):
        run(config, Stopper(after, baseline))
    return config


def metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, but for seconds."""
    lines = [json.loads(line) for line in (path / METRICS).read_text().splitlines()]
    return [{key: item for key, item in line.items() if key != "seconds"} for line in lines]


SPENT = ("seconds", "resources")


def results(path: Path) -> dict[str, Any]:
    """All that a run and its baselines leave, but for times: metrics, summary, ledger, all bits of the states."""
    summary = json.loads((path / SUMMARY).read_text())
    found = {"summary": {key: item for key, item in summary.items() if key not in SPENT}, "metrics": metrics(path)}
    found["states"] = files(path / "states")
    found["labels"] = {file.name: read_metadata(file) for file in (path / "states").iterdir()}
    with Ledger.open(path, server=False) as ledger:
        found["rounds"] = [dataclasses.replace(row, time="") for row in ledger.rounds()]
        found["latest"] = {name: ledger.history(name) for name in ledger.sites()}
    beside = path / "baselines"
    return {**found, **{one.name: results(one) for one in (beside.iterdir() if beside.is_dir() else ())}}


def no_metrics(path: Path) -> None:
    (path / METRICS).unlink()


def orphans(path: Path) -> None:
    """A reply of the next round, as a blob that no row refers to, one half written, and one that a worker left."""
    with Ledger.open(path) as ledger:
        orphan = ledger.blobs.put({"extractor.0.weight": torch.ones(3, dtype=torch.int64)})
        (ledger.blobs.folder / f".{orphan}.safetensors-x").write_bytes(b"half")
    left = path / "staging" / "site-0001.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
