"""The folder of a run: what is written where, so that others can read it."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clients.states import write_bytes, write_state
from conf import to_yaml
from conf.errors import UserError
from conf.schema import Config
from fusion.exact import State

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"


def stored(config: Config) -> str:
    """The text of config.yaml: the configuration, but for the order to overwrite."""
    return to_yaml(dataclasses.replace(config, run=dataclasses.replace(config.run, overwrite=False)))


@dataclass(frozen=True)
class RunFolder:
    """runs/<name>/ with config.yaml, metrics.jsonl, summary.json, states/ and, later, plots/ and report.html."""

    path: Path

    def open(self, config: Config) -> None:
        """Make it. Raises UserError if a run of that name exists (unless run.overwrite) or nothing can be written there."""
        refuse_existing(config, self.path)
        try:
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True)
            write_bytes(self.path / CONFIG, stored(config).encode())
            (self.path / METRICS).touch()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error}); choose another run.root") from None

    def append(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        write_bytes(self.path / SUMMARY, json.dumps(summary, indent=2).encode())

    def write_network(self, name: str, state: State, **metadata: str) -> None:
        """Write a network's final state to states/<name>.safetensors."""
        write_state(self.path / "states" / f"{name}.safetensors", state, **metadata)


def refuse_existing(config: Config, path: Path | None = None) -> None:
    """UserError if a run of that name exists, unless it is a run and run.overwrite says that it may go."""
    path = path or Path(config.run.root) / config.run.name
    if not path.exists():
        return
    if not config.run.overwrite:
        raise UserError(f"the run '{config.run.name}' exists ({path}): pass --overwrite, or another run.name=")
    if not _is_run(path):
        raise UserError(f"{path} is no run of fedloom (by its {CONFIG}): it will not be overwritten")


def _is_run(path: Path) -> bool:
    try:
        tree = yaml.safe_load((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(tree, dict) and {field.name for field in dataclasses.fields(Config)} <= tree.keys()
