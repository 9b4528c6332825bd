"""The folder of a run: write its files, in a form that other programs can read."""

import dataclasses
import errno
import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fedloom.clients.data.found import Encoding
from fedloom.clients.data.splits import SplitRule
from fedloom.clients.networks import Model
from fedloom.clients.networks.named import split_metadata
from fedloom.clients.storage.states import read_metadata, read_state, write_bytes, write_private_state, write_state
from fedloom.conf import to_yaml
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.conf.sites import BEST
from fedloom.fusion.state import State
from fedloom.server.ledger.blobs import LedgerError
from fedloom.server.ledger.database import acquire, unlock
from fedloom.server.run_folder.layout import (
    CONFIG,
    DATA,
    LOCK,
    LOSSES,
    METRICS,
    STANDARDISATION,
    STATES,
    SUFFIXES,
    SUMMARY,
    TABLES,
    WRITTEN_NAMES,
    is_left,
    noted,
    notes_on,
    own_in,
)
from fedloom.server.run_folder.listing import holds, read_config, read_object, read_summary, refuse_existing
from fedloom.server.run_folder.metrics_file import read_metrics
from fedloom.server.run_folder.results_schema import LOSS, without_values

__all__ = ["CONFIG", "METRICS", "SUMMARY", "RunFolder", "holds", "is_file_name", "read_config", "refuse_existing"]

AGGREGATE, MAX_NAME_BYTES = "aggregate", 100  # the aggregate's file name; the most bytes of a file name


def stored(config: Config) -> str:
    """Return the text of config.yaml: the configuration without run.overwrite and run.resume."""
    return to_yaml(dataclasses.replace(config, run=dataclasses.replace(config.run, overwrite=False, resume=False)))


@dataclass(frozen=True)
class RunFolder:
    """The folder runs/<name>/: configuration, metrics, summary, ledger, states/, plots/ and report."""

    path: Path

    def open(self, config: Config) -> None:
        """Create the folder, as `begin` does, and leave it to others."""
        if (lock := self.begin(config)) is not None:
            (self.path / LOCK).unlink()
            unlock(lock)

    def begin(self, config: Config) -> int | None:
        """Create the folder and return its lock, as `acquire`. If config.run.resume is set and it exists, return None.

        No one else can work in the folder, or replace it, until the lock is released. Raises UserError if a run of that
        name exists (unless run.overwrite), is not the one to resume, or the folder cannot be written.
        """
        refuse_existing(config, self.path)
        if config.run.resume and self.path.exists():
            return None
        lock: int | None = None
        mine = uuid.uuid4().hex[:12]  # threads of one process may create the same run
        new, old = (self.path.with_name(f".{self.path.name}.{what}-{mine}") for what in ("new", "old"))
        try:
            write_bytes(new / CONFIG, stored(config).encode())
            (new / METRICS).touch()
            RunFolder(new).note_written(())
            lock = acquire(new)
            if config.run.overwrite and self.path.exists():
                self._move(old)
            new.rename(self.path)
            return lock
        except BaseException as error:
            if lock is not None:
                unlock(lock)
            if not isinstance(error, OSError):
                raise
            return self._lost(config, error)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    def _move(self, old: Path) -> None:
        """Rename the folder to `old`, unless another process has just done so. Raises BusyError if a server works on it."""
        try:
            lock = acquire(self.path)  # until it is renamed, so that no server starts in it meanwhile
        except LedgerError:
            if self.path.exists():
                raise
            return
        try:
            self.path.rename(old)
        finally:
            unlock(lock)

    def _lost(self, config: Config, error: OSError) -> None:
        """Raise UserError for a folder that could not be created, unless another process has created the run to resume."""
        if config.run.resume and holds(self.path, config):
            return
        if self.path.exists():  # another process has just created it
            refuse_existing(config, self.path)
            raise UserError(f"{self.path}: another process has just created this run; set another run.name=") from None
        space = "free space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise UserError(f"{self.path}: cannot be written ({error.strerror or error}); {space}set another run.root") from None

    def check(self, config: str) -> None:
        """Raise UserError unless config.yaml is still `config`, the text at the run's start."""
        here, there = (text.splitlines() for text in (self.config(), config))
        changed = next((pair for pair in zip_longest(here, there) if pair[0] != pair[1]), None)
        if changed is not None:
            now, then = (f"'{line.strip()}'" if line is not None else "nothing" for line in changed)
            raise UserError(f"{self.path / CONFIG}: was changed after the run began: {now}, was {then}; undo the change")

    def config(self) -> str:
        """Return the text of config.yaml; empty if it is missing."""
        path = self.path / CONFIG
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def write_config(self, text: str) -> None:
        """Write config.yaml."""
        write_bytes(self.path / CONFIG, text.encode())

    def append(self, record: dict[str, Any]) -> None:
        """Add a round's record to metrics.jsonl."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def note_losses(self, number: int, losses: Mapping[str, float]) -> None:
        """Store the sites' losses of a round before its commit, since the ledger does not have them."""
        write_bytes(self.path / LOSSES, json.dumps({"round": number, LOSS: losses}).encode(), durable=False)

    def noted_losses(self, number: int) -> dict[str, float]:
        """Return the stored losses of a round, for a missing line in metrics.jsonl; empty if they are not stored."""
        noted = read_object(self.path / LOSSES)
        return noted[LOSS] if noted.get("round") == number else {}

    def metrics(self) -> dict[int, dict[str, Any]]:
        """Return the records in metrics.jsonl by round, without a line that a crash tore."""
        return read_metrics(self.path)

    def write_metrics(self, records: Iterable[dict[str, Any]]) -> None:
        """Replace metrics.jsonl by these records."""
        write_bytes(self.path / METRICS, "".join(json.dumps(record) + "\n" for record in records).encode())

    def forget_values(self, gone: Set[str]) -> None:
        """Remove from metrics.jsonl the values of single sites in rounds with a site in `gone` (`without_values`)."""
        if records := self.metrics():
            self.write_metrics(without_values(records.values(), gone))

    def note_written(self, files: Iterable[str]) -> None:
        """Note files, such as plots/accuracy.png, before they are written: others in their folders are never deleted."""
        before, path = noted(self.path), self.path / WRITTEN_NAMES
        new = [name for name in SUFFIXES if not notes_on(before, name)]
        present = {str(file.relative_to(self.path)) for name in new for file in own_in(self.path, name)}
        after = (before or set()).union(files, present, (f"{name}/" for name in new))
        if not path.exists() or after != before:
            write_bytes(path, json.dumps(sorted(after), indent=2).encode(), private=True)

    def note_networks(self, names: Iterable[str]) -> None:
        """Note the files of networks, by the networks' names, as `note_written`."""
        self.note_written(f"{STATES}/{name}.safetensors" for name in names)

    def sweep(self) -> None:
        """Remove the temporary files that a crash left."""
        for folder in (self.path, self.path / STATES):
            for path in folder.glob(".*-*"):
                if is_left(path.name) and path.is_file():
                    path.unlink()

    def results(self) -> dict[str, str]:
        """Return the sha256 of each result file, by its path in the folder, without users' files."""
        names = [
            CONFIG,
            METRICS,
            SUMMARY,
            STANDARDISATION,
            *(f"{STATES}/{path.name}" for path in own_in(self.path, STATES) if path.suffix == ".safetensors"),
        ]
        files = {name: self.path / name for name in sorted(names)}
        return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()}

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        write_bytes(self.path / SUMMARY, json.dumps(summary, indent=2).encode())

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json; empty if it cannot be read."""
        return read_summary(self.path)

    def write_network(self, name: str, model: Model, config: Config | None = None, **metadata: str) -> None:
        """Write a network's final state to states/<name>.safetensors. The name must be valid (`is_file_name`).

        Only the user can read the file, unless it is the aggregate: it may be one site's network. The file records the
        network, its form, and the split of `config`, the run's configuration.
        """
        write, split = write_state if name == AGGREGATE else write_private_state, SplitRule.of(config) if config else None
        facts = {"network": model.architecture.network, "form": json.dumps(model.architecture.form.plain())}
        facts |= {**split_metadata(split), **metadata}
        self.note_networks([name])
        write(self.path / STATES / f"{name}.safetensors", model.state, **facts)

    def best(self) -> dict[str, Any]:
        """Return the round, metric and validation value of the run's best network; empty if it has none."""
        path = self.path / STATES / f"{BEST}.safetensors"
        facts = read_metadata(path) if path.is_file() else {}
        return {"round": int(facts["round"]), "metric": facts["metric"], "value": float(facts["value"])} if facts else {}

    def best_state(self) -> State:
        """Return the state of the run's best network."""
        return read_state(self.path / STATES / f"{BEST}.safetensors")

    def note_data(self, digests: Mapping[str, str]) -> list[str]:
        """Save digests of the data. Return a warning for each path that has changed, and for a damaged file of digests."""
        path, changed = self.path / DATA, self.changed(digests)
        damaged = path.is_file() and not read_object(path)
        if digests and digests != read_object(path):
            write_bytes(path, json.dumps(digests, indent=2).encode())
        lines = [f"{name} has changed since the run began: earlier rounds used the former data. If this is wrong, restore "
                 "it, or start a new run." for name in changed]  # fmt: skip
        return [
            *lines,
            *([f"{path} is damaged: whether data have changed since the run began is unknown"] if damaged else []),
        ]

    def changed(self, digests: Mapping[str, str]) -> list[str]:
        """Return the paths of data whose digests differ from the saved ones."""
        before = read_object(self.path / DATA)
        return [name for name, digest in digests.items() if before.get(name, digest) != digest]

    def note_tables(self, domains: Iterable[str], encoding: Callable[[str], Encoding | None] = lambda domain: None) -> None:
        """Save how the rows of these domains' tables become inputs, and nothing of other domains. Saved ones stay."""
        saved, path = read_object(self.path / TABLES), self.path / TABLES
        found = {name: saved.get(name) or (vars(made) if (made := encoding(name)) else None) for name in domains}
        if (tables := {name: each for name, each in found.items() if each}) != saved:
            write_bytes(path, json.dumps(tables, indent=2).encode())

    def table(self, domain: str) -> Encoding | None:
        """Return how the rows of a domain's table become inputs, as saved when the run began; None if it is not saved."""
        try:
            return Encoding(**read_object(self.path / TABLES)[domain])
        except (KeyError, TypeError):
            return None

    def write_standardisation(self, records: Mapping[str, State]) -> None:
        """Write the mean and deviation by which the networks' inputs are standardised, if there are any.

        clients.data.standardise.Standardisation.parsed reads the file's tensors.
        """
        for state in records.values():
            write_state(self.path / STANDARDISATION, state)


def is_file_name(name: object) -> bool:
    """Return whether a file can have this name: printable, short, not hidden, not a path."""
    if not isinstance(name, str) or not name.isprintable() or set(name) & {"/", "\\"}:
        return False
    return not name.startswith(".") and 0 < len(name.encode()) <= MAX_NAME_BYTES
