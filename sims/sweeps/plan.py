"""Plan a sweep: turn an experiment, seeds and values of keys into runs, each with its own folder."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError, plain
from fedloom.conf.loading import MOST_RUN_NAME_BYTES, read_override, read_values, to_json
from fedloom.conf.schema import Config, RunConfig
from fedloom.server.run_folder.layout import CONFIG
from fedloom.server.run_folder.listing import FINISHED, holds, is_run, read_summary, refuse_other
from fedloom.sims.sweeps.names import part_of_name, short_keys, text_of

SEED = "seed"
EXPERIMENT = "experiment"
MOST_RUNS = 1000  # each configuration takes some 20 ms to read and check
MOST_CHARACTERS = 100  # characters of the input in an error
KEPT = "run"  # the section with a run's folder, which the sweep sets itself
Load = Callable[[Sequence[str]], Config]  # an experiment with overrides


@dataclass(frozen=True)
class Planned:
    """One run of a sweep. `values`: those of the swept keys and the seed. `done`: the run is already finished."""

    config: Config
    values: Mapping[str, Any]
    done: bool = False

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.root) / self.config.run.name

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.config.run.name


def read_sweep(seeds: str | None, sweep: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each key, from seeds such as `0,1,2` and sweeps such as `training.rate=0.01,0.03`.

    Raises UserError for input that it cannot read.
    """
    grid: dict[str, list[Any]] = {}
    for word in sweep:
        key, values = read_values(word)
        if key in grid:
            raise UserError(f"--sweep: {key} appears twice; write all its values in one --sweep")
        grid[key] = values
    if seeds is not None:
        if SEED in grid:
            raise UserError("--seeds: --sweep has seeds, too; leave one of the two out")
        grid[SEED] = _read_seeds(seeds)
    return grid


def _read_seeds(seeds: str) -> list[Any]:
    try:
        return read_values(f"{SEED}={seeds}")[1]
    except UserError:
        message = f"--seeds: got '{plain(seeds)[:MOST_CHARACTERS]}', takes whole numbers with commas between, such as 0,1,2"
        raise UserError(message) from None


def plan(load: Load, overrides: Sequence[str], grid: Mapping[str, Sequence[Any]]) -> list[Planned]:
    """Return a run for every combination of the values in `grid`. The seed changes fastest.

    Raises UserError for keys and values that the configuration does not accept, and for two equal runs.
    """
    keys = sorted(grid, key=lambda key: key == SEED)
    _check_keys(keys, grid, overrides)
    _check_size(grid)
    planned: list[Planned] = []
    for combination in itertools.product(*(grid[key] for key in keys)):
        values = dict(zip(keys, combination, strict=True))
        planned.append(Planned(_named(_loaded(load, overrides, values), values), values))
    _refuse_twice(planned)
    return planned


def _check_keys(keys: Sequence[str], grid: Mapping[str, Sequence[Any]], overrides: Sequence[str]) -> None:
    for key in keys:
        if key == EXPERIMENT:
            raise UserError(f"{key}: cannot be swept; start one sweep for each experiment")
        if key.partition(".")[0] == KEPT:
            raise UserError(f"{key}: the folder of a run cannot be swept; the sweep names each folder by its values")
        if not grid[key]:
            raise UserError(f"{key}: has no values to sweep")
        _check_overrides(key, overrides)
    for inner, outer in itertools.permutations(keys, 2):
        if inner.startswith(f"{outer}."):
            raise UserError(f"{inner}: is inside {outer}, which is swept, too; set it in each value of {outer} instead")


def _check_overrides(key: str, overrides: Sequence[str]) -> None:
    """Raise UserError for an override of the swept key, of a key inside it, or of a section that sets it."""
    for override in overrides:
        name, _, value = override.partition("=")
        if name.startswith(f"{key}."):
            raise UserError(f"{name}: is inside {key}, which is swept; set it in each value of {key} instead")
        if name == key or (key.startswith(f"{name}.") and value and _has(read_override(override), key[len(name) + 1 :])):
            raise UserError(f"{key}: is swept and also set by an override; leave one of the two out")


def _has(value: Any, key: str) -> bool:
    """Return whether a dotted key has a value in a section or a list."""
    for part in key.split("."):
        inside: Any = {str(index): entry for index, entry in enumerate(value)} if isinstance(value, list) else value
        if not isinstance(inside, Mapping) or part not in inside:
            return False
        value = inside[part]
    return True


def _check_size(grid: Mapping[str, Sequence[Any]]) -> None:
    if (many := math.prod(map(len, grid.values()))) > MOST_RUNS:
        raise UserError(f"sweep: makes {many:,} runs, takes at most {MOST_RUNS:,}; use fewer values, or several sweeps")


def _loaded(load: Load, overrides: Sequence[str], values: Mapping[str, Any]) -> Config:
    try:
        more = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    except TypeError:
        raise UserError(f"sweep: takes lists of texts, numbers, lists and dictionaries; got {values!r}"[:200]) from None
    try:
        return load([*overrides, *more])
    except UserError as error:
        swept = " ".join(f"{key}={text_of(value)}" for key, value in values.items())
        raise UserError(f"{error} (the run with {swept})") from None


def _named(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with a folder named after its swept values: digits-rate=0.01-seed=0."""
    short = short_keys(values)
    name = "-".join([config.run.name, *(f"{short[key]}={part_of_name(value)}" for key, value in values.items())])
    if len(name.encode()) > MOST_RUN_NAME_BYTES:
        raise UserError(f"sweep: the folder name '{name[:60]}...' is too long; use a shorter run.name=, or fewer keys")
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))


def _refuse_twice(planned: Sequence[Planned]) -> None:
    """Raise UserError for two runs with the same configuration or the same name."""
    seen: set[str] = set()
    for run in planned:
        same = to_json(dataclasses.replace(run.config, run=RunConfig()))
        if seen & {same, run.name}:
            swept = " ".join(f"{key}={text_of(value)}" for key, value in run.values.items())
            raise UserError(f"sweep: two runs are the same ({swept}); write each value once")
        seen |= {same, run.name}


def placed(run: Planned, overwrite: bool) -> Planned:
    """Return the run marked as done, set to resume, set to `overwrite`, or unchanged, according to its folder.

    Raises UserError if the folder holds something else.
    """
    if overwrite:
        return ordered(run, overwrite=True)
    if not run.folder.exists():
        return run
    if not holds(run.folder, run.config):
        refuse_other(run.folder)
        what = f"a run of another configuration ({CONFIG})" if is_run(run.folder) else "a damaged run"
        raise UserError(f"{run.folder}: exists, and holds {what}; pass --overwrite, or another run.name=")
    if read_summary(run.folder).get("status") == FINISHED:
        return dataclasses.replace(run, done=True)
    return ordered(run, resume=True)


def ordered(run: Planned, **how: bool) -> Planned:
    """Return the run with these keys changed in the section `run` of its configuration."""
    section = dataclasses.replace(run.config.run, **how)
    return dataclasses.replace(run, config=dataclasses.replace(run.config, run=section))
