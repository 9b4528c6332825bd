"""From an experiment, seeds and values of keys to the runs that there are to be, each with a folder of its own."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError, plain
from fedloom.conf.load import MOST_RUN_NAME_BYTES, read_override, read_values, to_json
from fedloom.conf.schema import Config, RunConfig
from fedloom.server.run_folder.layout import CONFIG
from fedloom.server.run_folder.listing import FINISHED, holds, is_run, read_summary
from fedloom.sims.sweeps.names import part_of_name, short_keys, text_of

SEED = "seed"
EXPERIMENT = "experiment"
MOST_RUNS = 1000  # each configuration takes some 20 ms to read and check
MOST_TOLD = 100  # letters of what was given
KEPT = "run"  # the section that says where a run is kept, which the sweep itself does
Load = Callable[[Sequence[str]], Config]  # an experiment with overrides


@dataclass(frozen=True)
class Planned:
    """One run. `values`: the swept keys' and the seed's. `done`: it is finished already, and kept."""

    config: Config
    values: Mapping[str, Any]
    done: bool = False

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        return Path(self.config.run.root) / self.config.run.name

    @property
    def name(self) -> str:
        """Its folder's."""
        return self.config.run.name


def read_sweep(seeds: str | None, sweep: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each key, from `0,1,2` and words such as `training.rate=0.01,0.03`. UserError for what is none."""
    grid: dict[str, list[Any]] = {}
    for word in sweep:
        key, values = read_values(word)
        if key in grid:
            raise UserError(f"--sweep: {key} is given twice; give all its values at once")
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
        message = f"--seeds: got '{plain(seeds)[:MOST_TOLD]}', takes whole numbers with commas between, such as 0,1,2"
        raise UserError(message) from None


def plan(load: Load, overrides: Sequence[str], grid: Mapping[str, Sequence[Any]]) -> list[Planned]:
    """Every combination of the values, the seed changing fastest.

    Raises UserError for keys and values that the configuration does not take, and for a run that is there twice.
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
            raise UserError(f"{key}: cannot be swept: it is named before all else; one sweep for each experiment")
        if key.partition(".")[0] == KEPT:
            raise UserError(f"{key}: where runs are kept cannot be swept: each has a folder named after what is")
        if not grid[key]:
            raise UserError(f"{key}: has no values to sweep")
        _check_overrides(key, overrides)
    for inner, outer in itertools.permutations(keys, 2):
        if inner.startswith(f"{outer}."):
            raise UserError(f"{inner}: is inside {outer}, which is swept, too; give it in each value of that instead")


def _check_overrides(key: str, overrides: Sequence[str]) -> None:
    """UserError for an override of the swept key, of something inside it, or of a section that has it."""
    for override in overrides:
        name, _, value = override.partition("=")
        if name.startswith(f"{key}."):
            raise UserError(f"{name}: is inside {key}, which is swept; give it in each value of that instead")
        if name == key or (key.startswith(f"{name}.") and value and _has(read_override(override), key[len(name) + 1 :])):
            raise UserError(f"{key}: is given as an override, too; leave one of the two out")


def _has(value: Any, key: str) -> bool:
    """Whether a dotted key has a value in a section or a list."""
    for part in key.split("."):
        inside: Any = {str(index): entry for index, entry in enumerate(value)} if isinstance(value, list) else value
        if not isinstance(inside, Mapping) or part not in inside:
            return False
        value = inside[part]
    return True


def _check_size(grid: Mapping[str, Sequence[Any]]) -> None:
    if (many := math.prod(map(len, grid.values()))) > MOST_RUNS:
        raise UserError(f"sweep: makes {many:,} runs, takes at most {MOST_RUNS:,}; give fewer values, or several sweeps")


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
    """The configuration with a folder that says what is swept: digits-rate=0.01-seed=0."""
    short = short_keys(values)
    name = "-".join([config.run.name, *(f"{short[key]}={part_of_name(value)}" for key, value in values.items())])
    if len(name.encode()) > MOST_RUN_NAME_BYTES:
        raise UserError(f"sweep: the folder's name '{name[:60]}...' is too long; give a shorter run.name=, or fewer keys")
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))


def _refuse_twice(planned: Sequence[Planned]) -> None:
    """UserError for two runs of the same configuration, or of the same name."""
    seen: set[str] = set()
    for run in planned:
        same = to_json(dataclasses.replace(run.config, run=RunConfig()))
        if seen & {same, run.name}:
            swept = " ".join(f"{key}={text_of(value)}" for key, value in run.values.items())
            raise UserError(f"sweep: the same run is asked for twice ({swept}); give each value once")
        seen |= {same, run.name}


def placed(run: Planned, overwrite: bool) -> Planned:
    """The same: to be kept, to go on, or to start, by what is in its folder. UserError if that is another run."""
    if overwrite:
        return ordered(run, overwrite=True)
    if not run.folder.exists():
        return run
    if not holds(run.folder, run.config):
        what = f"a run of another configuration ({CONFIG})" if is_run(run.folder) else "no run of fedloom"
        raise UserError(f"{run.folder}: is there, and holds {what}; pass --overwrite, or another run.name=")
    if read_summary(run.folder).get("status") == FINISHED:
        return dataclasses.replace(run, done=True)
    return ordered(run, resume=True)


def ordered(run: Planned, **how: bool) -> Planned:
    """The same, to be run so."""
    section = dataclasses.replace(run.config.run, **how)
    return dataclasses.replace(run, config=dataclasses.replace(run.config, run=section))
