"""What all reproductions share: their options, a cache of results, the runs they need, and the files they write."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedloom.clients.storage.states import write_bytes
from fedloom.conf.errors import FailedError, UserError, unknown
from fedloom.conf.formatting import count
from fedloom.conf.schema import Config
from fedloom.server.strategies.defaults import with_default_objective
from fedloom.sims.experiments import papers
from fedloom.sims.report.page import Part, write_page
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Cell, Table
from fedloom.sims.sweeps.plan import Planned
from fedloom.sims.sweeps.work import carry_out, ready

MAX_PRINTED = 200  # characters of a result that are printed


@dataclass(frozen=True)
class Study:
    """One call of `fedloom reproduce`.

    Attributes:
        preset: The preset.
        folder: The folder for results.
        seeds: The number of seeds.
        quiet: Whether to print nothing while measuring.
        only: The selected tasks, methods or sequences; empty: all.
        overrides: Overrides of every run's configuration.
    """

    preset: str
    folder: Path
    seeds: int = 1
    quiet: bool = True
    only: Sequence[str] = ()
    overrides: Sequence[str] = ()

    def once(self, name: str, key: Any, make: Callable[[], Any], label: str = "") -> Any:
        """Return the result saved as results/NAME.json if its key is equal; else call `make`, and save what it returns.

        A new result is printed with `label` (default: the name), unless the study is quiet.
        """
        path = self.folder / "results" / f"{'/'.join(map(slug, name.split('/')))}.json"
        key = json.loads(json.dumps(key, default=_plain))
        saved = _read(path)
        if saved.get("key") != key:
            begin = time.perf_counter()
            saved = {"key": key, "value": json.loads(json.dumps(make()))}
            write_bytes(path, json.dumps(saved).encode())
            if not self.quiet:
                print(f"{label or name}: {_short(saved['value'])} ({time.perf_counter() - begin:.0f} s)", flush=True)
        return saved["value"]

    def each_seed(self, measure: Callable[[int], Any]) -> list[Any]:
        """Return what `measure` returns for seeds 0, 1, ..."""
        return [measure(seed) for seed in range(self.seeds)]

    def saved_each(self, name: str, key: Any, make: Callable[[int], Any]) -> list[Any]:
        """Return for each seed what `make` returns, saved as by `once`."""
        return [self.once(f"{name}-{seed}", key, partial(make, seed)) for seed in range(self.seeds)]

    def runs(self, configs: Sequence[Config]) -> list[Mapping[str, Any]]:
        """Run federations, and return their summaries. Finished runs are not repeated, and interrupted ones continue.

        Raises UserError for a configuration that cannot work, and FailedError if a run fails.
        """
        outcomes = carry_out(ready([Planned(with_default_objective(config), {}) for config in configs]), quiet=self.quiet)
        for outcome in outcomes:
            if outcome.missing:
                raise FailedError(f"{outcome.folder}: {outcome.error}")
        return [outcome.summary for outcome in outcomes]

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], note: str = "") -> Table:
        """Return a table whose title ends with the number of seeds."""
        return Table(f"{title}, {count(self.seeds, 'seed')}", columns, rows, note)


@dataclass(frozen=True)
class Reproduction:
    """A command `fedloom reproduce NAME`.

    Attributes:
        title: The report's title.
        folder: The folder for results; may contain {preset}.
        presets: The names of the presets.
        tables: By name (for the option `tables=`), a function that measures a table. A single one named "" is always made.
        paper: The paper.
        option: One more option: its name, and a function that returns its values for a preset and the tables.
        check: Refuses bad overrides; None: all overrides are refused.
        one_thread: Whether PyTorch uses one thread.
    """

    title: str
    folder: str
    presets: Collection[str]
    tables: Mapping[str, Callable[[Study], Sequence[Part]]]
    paper: str = ""
    option: tuple[str, Callable[[str, Sequence[str]], Iterable[str]]] | None = None
    check: Callable[[Sequence[str]], object] | None = None
    one_thread: bool = True

    def __call__(self, preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
        """Measure the tables with every seed, and write tables.md and report.html. Results on disk are used again.

        Returns the folder. Raises UserError for an unknown preset, and for a bad table or override.
        """
        if preset not in self.presets:
            raise unknown("preset", preset, self.presets)
        names, rest = (list[str](), list(overrides)) if "" in self.tables else chosen("tables", overrides, self.tables)
        only = list[str]()
        if self.option:
            key, known = self.option
            only, rest = chosen(key, rest, list(known(preset, names)))
        if rest and self.check is None:
            options = [f"{key}=NAME,NAME" for key in self._options()]
            raise UserError(f"override '{rest[0]}': this reproduction takes {', '.join(options) or 'no overrides'}")
        if self.check:
            self.check(rest)
        if self.one_thread:
            torch.set_num_threads(1)
        study, parts = Study(preset, self.folder_of(preset), seeds, quiet, only, rest), list[Part]()
        for make in dict.fromkeys(self.tables[name] for name in names or self.tables):
            parts += make(study)
            self._write(study, parts)  # the tables measured so far
        return study.folder

    def folder_of(self, preset: str) -> Path:
        """Return the folder of a preset. Without {preset} in its name, only presets other than "cpu" have a suffix."""
        suffix = "" if preset == "cpu" or "{preset}" in self.folder else f"-{preset}"
        return Path(self.folder.format(preset=preset) + suffix)

    def _options(self) -> list[str]:
        return [*([] if "" in self.tables else ["tables"]), *([self.option[0]] if self.option else [])]

    def _write(self, study: Study, parts: Sequence[Part]) -> None:
        study.folder.mkdir(parents=True, exist_ok=True)
        texts = [
            part.markdown() if isinstance(part, Table) else f"{part}\n" for part in parts if isinstance(part, Table | str)
        ]
        (study.folder / "tables.md").write_text("\n".join(texts), encoding="utf-8")
        source = [f"(paper): {papers.source_of(self.paper)}."] if self.paper else []
        title = f"{self.title}, preset {study.preset}, {count(study.seeds, 'seed')}"
        write_page(study.folder / "report.html", title, [("", [*source, *parts])])


def chosen(key: str, overrides: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the names that overrides KEY=NAME,NAME select, and the other overrides. Raises UserError for unknown names."""
    selecting = [word for word in overrides if word.startswith(f"{key}=")]
    names = [name for word in selecting for name in word.partition("=")[2].split(",")]
    for name in names:
        if name not in known:
            raise unknown(key.removesuffix("s"), name, known)
    return names, [word for word in overrides if word not in selecting]


def any_override(overrides: Sequence[str]) -> None:
    """Accept every override without a check: the runs check them."""


def means(results: Sequence[Any], *paths: Sequence[Any]) -> list[str]:
    """Return, for each path of keys into a result, the mean and standard deviation over results, in %, as text."""
    return [mean_and_spread([at(result, path) for result in results]) for path in paths]


def at(result: Any, path: Iterable[Any]) -> Any:
    """Return the value at a path of keys and indices in a nested result."""
    for key in path:
        result = result[key]
    return result


def fingerprint(key: Any, letters: int = 12) -> str:
    """Return a short hash of a JSON value, for a file name."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=_plain).encode()).hexdigest()[:letters]


def slug(name: str) -> str:
    """Return the name in small letters and digits, with a hyphen for each run of other characters."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else vars(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def _short(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("test"), list):
        return ", ".join(f"{100 * share:.1f}" for share in value["test"]) + " %"
    return str(value)[:MAX_PRINTED]
