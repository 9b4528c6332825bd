"""The folder of a run: what is written where, so that others can read it."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from clients.networks import Model
from clients.states import write_bytes, write_state
from conf import to_yaml
from conf.errors import UserError
from conf.load import from_mapping
from conf.schema import Config, RunConfig
from conf.yamls import read_yaml
from server.ledger.database import acquire

AGGREGATE, LONGEST = "aggregate", 100  # a network's file, and bytes of the name of any
CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
KEYS = {"experiment", "seed", "rounds", "sites", "population", "network", "objective", "strategy", "baselines", "run",
        "engine", "data", "training", "federation", "evaluation"}  # in every run's config.yaml, since version 1  # fmt: skip


def stored(config: Config) -> str:
    """The text of config.yaml: the configuration, but for the order to overwrite or to resume."""
    return to_yaml(dataclasses.replace(config, run=dataclasses.replace(config.run, overwrite=False, resume=False)))


@dataclass(frozen=True)
class RunFolder:
    """runs/<name>/ with config.yaml, metrics.jsonl, summary.json, the ledger, states/ and, later, plots/ and report.html."""

    path: Path

    def open(self, config: Config) -> None:
        """Make it, or leave it as it is if config.run.resume says so and it is there.

        Raises UserError if a run of that name exists (unless run.overwrite), is another one than the one to resume, or
        nothing can be written there.
        """
        refuse_existing(config, self.path)
        if config.run.resume and self.path.exists():
            return
        new, old = (self.path.with_name(f".{self.path.name}.{what}-{os.getpid()}") for what in ("new", "old"))
        try:
            write_bytes(new / CONFIG, stored(config).encode())
            (new / METRICS).touch()
            if self.path.exists():
                os.close(acquire(self.path))  # nobody is at work on it
                self.path.rename(old)
            new.rename(self.path)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error}); choose another run.root") from None
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def check(self, config: str) -> None:
        """UserError unless config.yaml is this text, with which the run was begun."""
        here, there = (text.splitlines() for text in (self.config(), config))
        odd = next((pair for pair in zip_longest(here, there) if pair[0] != pair[1]), None)
        if odd is not None:
            now, then = (f"'{line.strip()}'" if line is not None else "nothing" for line in odd)
            raise UserError(f"{self.path / CONFIG}: was changed after the run began: {now}, was {then}; undo that")

    def config(self) -> str:
        """The text of config.yaml; empty without one."""
        path = self.path / CONFIG
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def append(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> dict[int, dict[str, Any]]:
        """The records in metrics.jsonl by round; a line that a crash tore is left out."""
        found, path = {}, self.path / METRICS
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
            try:
                record = json.loads(line)
                found[int(record["round"])] = record
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def write_metrics(self, records: Iterable[dict[str, Any]]) -> None:
        """Write metrics.jsonl anew."""
        write_bytes(self.path / METRICS, "".join(json.dumps(record) + "\n" for record in records).encode())

    def sweep(self) -> None:
        """Remove temporary files that a crash left (clients.states.write_bytes)."""
        for place in (self.path, self.path / "states"):
            for path in place.glob(".*-*"):
                path.unlink()

    def results(self) -> dict[str, str]:
        """The sha256 of the files that say what came out, by their path in the folder."""
        names = [CONFIG, METRICS, SUMMARY, *(f"states/{path.name}" for path in (self.path / "states").glob("*.safetensors"))]
        files = {name: self.path / name for name in sorted(names)}
        return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()}

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        write_bytes(self.path / SUMMARY, json.dumps(summary, indent=2).encode())

    def summary(self) -> dict[str, Any]:
        """What write_summary wrote; empty if there is nothing that can be read."""
        try:
            found = json.loads((self.path / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def seconds(self) -> float:
        """How long the sessions before this one took: those that left a summary."""
        found = self.summary().get("seconds")
        return float(found) if isinstance(found, int | float) else 0.0

    def write_network(self, name: str, model: Model, **metadata: str) -> None:
        """Write a network's final state to states/<name>.safetensors; the name is one of a file (`is_file_name`)."""
        write_state(
            self.path / "states" / f"{name}.safetensors", model.state, network=model.architecture.network, **metadata
        )


def is_file_name(name: object) -> bool:
    """Whether a file in a folder can have this name: printable, short, no path and not hidden."""
    if not isinstance(name, str) or not name.isprintable() or set(name) & {"/", "\\"}:
        return False
    return not name.startswith(".") and 0 < len(name.encode()) <= LONGEST


def refuse_existing(config: Config, path: Path | None = None) -> None:
    """UserError if a run of that name exists, unless it is the one to resume, or run.overwrite says that it may go."""
    path = path or Path(config.run.root) / config.run.name
    if not path.exists():
        pass
    elif config.run.resume:
        _same_run(config, path)
    elif not config.run.overwrite:
        raise UserError(f"the run '{config.run.name}' exists ({path}): pass --overwrite, or another run.name=")
    elif not _is_run(path):
        raise UserError(f"{path} is no run of fedloom (by its {CONFIG}): it will not be overwritten")


def read_config(path: Path) -> Config:
    """The configuration of the run in a folder, its place being where the folder is now. Raises UserError if it is none."""
    if not _is_run(path):
        raise UserError(f"{path}: is no run of fedloom (no readable {CONFIG} in it); name the folder of a run")
    try:
        config = from_mapping(read_yaml((path / CONFIG).read_text(encoding="utf-8")))
    except UserError as error:
        raise UserError(f"{path / CONFIG}: {error}") from None
    if path.name != (whole := path.resolve()).name:  # a link, or '.'
        path = whole
    where = dataclasses.replace(config.run, name=path.name, root=str(path.parent))
    return dataclasses.replace(config, run=where)


def holds(path: Path, config: Config) -> bool:
    """Whether the folder has a run of this configuration, wherever it was made and whatever keys came since."""
    return _is_run(path) and _same(read_config(path), config)


def _same_run(config: Config, path: Path) -> None:
    """UserError unless the folder holds a run of this configuration."""
    if not _same(read_config(path), config):
        raise UserError(f"{path}: was run with another configuration ({CONFIG}); only that one can be resumed")


def _same(one: Config, other: Config) -> bool:
    """Whether both describe the same run, wherever it is kept and whatever tracks it."""
    here, there = (dataclasses.replace(config, run=RunConfig(), tracking=[]) for config in (one, other))
    return here == there


def _is_run(path: Path) -> bool:
    """Whether the folder is one that we have made, by the keys of its config.yaml; others are never deleted."""
    try:
        tree = read_yaml((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(tree, dict) and tree.keys() >= KEYS
