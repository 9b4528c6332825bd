"""Run a complete simulation: engine, experiment, plots and report. Or resume one that was stopped."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedloom.clients.data import absolute
from fedloom.clients.data.domains import data_folder
from fedloom.clients.data.listing import of_run
from fedloom.clients.training.torch_setup import ordinary
from fedloom.conf.errors import UserError, plain
from fedloom.conf.formatting import count
from fedloom.conf.loading import read_override
from fedloom.conf.progress import under_way
from fedloom.conf.schema import MOST_ROUNDS, Config
from fedloom.conf.sites import SiteConfig
from fedloom.server.ledger.database import refuse_busy
from fedloom.server.ledger.records import STOPPED
from fedloom.server.rounds.listener import Listener, Listeners
from fedloom.server.run.checks import check, check_settings
from fedloom.server.run.experiment import carry_out, finished
from fedloom.server.run_folder.folder import read_config, refuse_existing
from fedloom.server.run_folder.layout import REPORT
from fedloom.server.run_folder.scores import rounds_of
from fedloom.server.strategies.defaults import with_default_objective
from fedloom.sims.engines import open_engine, refuse_engine
from fedloom.sims.engines.share import WHOLE, Share
from fedloom.sims.progress.listeners import Watcher
from fedloom.sims.report.certificates import write_pages
from fedloom.sims.report.report import write_report


def simulate(
    config: Config,
    *,
    listener: Watcher | None = None,
    listeners: Sequence[Listener] = (),
    share: Share = WHOLE,
    notes: Sequence[str] = (),
    began: float | None = None,
) -> dict[str, Any]:
    """Run the experiment on its engine, write its report, and return the content of summary.json.

    Args:
        config: The experiment.
        listener: Shows the progress.
        listeners: Receive the same events. An exception from one of them ends the run.
        share: The part of the machine for this run, if several runs share it.
        notes: Lines about the configuration, to show before the run.
        began: The start of the run's time, from time.monotonic(). Default: now.

    Raises:
        UserError: Before anything starts, if the configuration, the data or the folder cannot work.
    """
    began = time.monotonic() if began is None else began
    config = absolute_paths(with_default_objective(config))
    folder = Path(config.run.root) / config.run.name
    with contextlib.ExitStack() as stack:
        stack.enter_context(of_run())
        stack.enter_context(ordinary())
        shown = stack.enter_context(listener or Watcher())
        with under_way("checking configuration and data"):
            refuse(config)
        for note in notes:
            shown.message(note)
        listening = Listeners([shown, *_trackers(config, shown, stack), *listeners])
        done = finished(config)
        summary = done or _carried_out(config, share, listening, began)
        write_pages(folder)
        report = folder / REPORT if done and (folder / REPORT).is_file() else write_report(folder)
        if done:
            more = "nothing remains to do"
            if early := done.get(STOPPED):
                more = f"it stopped early ({early['reason']}); add rounds={config.rounds + 1} or more to continue"
            listening.note(f"{folder}: the run is finished after {count(rounds_of(done) or 0, 'round')}; {more}")
        listening.note(f"report: {report}")
    return summary


def _trackers(config: Config, shown: Watcher, stack: contextlib.ExitStack) -> list[Listener]:
    if not config.tracking:
        return []
    from fedloom.sims.tracking import Tracking  # imports other packages only for runs that use them

    return [stack.enter_context(Tracking(config, shown.message))]


def _carried_out(config: Config, share: Share, listening: Listener, began: float) -> dict[str, Any]:
    with open_engine(config, share) as grid:
        listening.note(grid.describe())
        return carry_out(grid, config, listening, began)


def refuse(config: Config) -> None:
    """Raise UserError for every fault that is known before the start: of folder, engine, data, method, trackers."""
    refuse_engine(config)
    check_settings(config)  # mistakes come before a run that exists, and that before any data are read
    refuse_existing(config)
    refuse_busy(Path(config.run.root) / config.run.name)
    check(config)
    _check_engine(config)
    if config.tracking:
        from fedloom.sims.tracking import refuse_trackers

        refuse_trackers(config)


def resume(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    tracking: Sequence[Any] | None = None,
    listener: Watcher | None = None,
    listeners: Sequence[Listener] = (),
    began: float | None = None,
) -> dict[str, Any]:
    """Continue a run after its last committed round, and return its summary.

    `overrides`: `rounds=20`, or nothing: a run that has begun can only get more rounds.
    `tracking`: trackers that replace those of the configuration. The other arguments are those of `simulate`.
    """
    config = with_rounds(read_config(path), overrides)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
    if tracking is not None:
        config = dataclasses.replace(config, tracking=list(tracking))
    return simulate(config, listener=listener, listeners=listeners, began=began)


def with_rounds(config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration with the number of rounds in `rounds=N`. Raises UserError for other overrides."""
    for word in overrides:
        if not isinstance(word, str) or word.partition("=")[0] != "rounds":
            raise UserError(f"resume: got {word!r}, but a run that has begun can only get more rounds, such as rounds=20")
        rounds = read_override(word)
        if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= MOST_ROUNDS:
            raise UserError(f"rounds: got {plain(word.partition('=')[2])!r}, takes a whole number from 1 to {MOST_ROUNDS}")
        config = dataclasses.replace(config, rounds=rounds)
    return config


def _check_engine(config: Config) -> None:
    """Raise UserError for options that exclude each other, and for a missing data folder that should be sent."""
    engine, folder = config.engine, data_folder(config.data)
    if engine.device == "cuda" and engine.name != "flower" and not engine.address and not torch.cuda.is_available():
        raise UserError("engine.device: got cuda, but this machine has no GPU that torch can use; use auto or cpu")
    if engine.name == "ray":
        _check_gpus(config)
    if engine.compile and engine.vectorise > 1:
        raise UserError("engine.compile: sites trained as one (engine.vectorise) cannot be compiled; choose one of the two")
    if engine.name == "ray" and engine.address and engine.ship_data and not folder.is_dir():
        raise UserError(
            f"engine.ship_data: the data folder {folder} does not exist; set data.root (or FEDLOOM_DATA) to it, "
            "or leave engine.ship_data out"
        )


def _check_gpus(config: Config) -> None:
    with contextlib.suppress(ImportError):  # without Ray, its engine raises a better error
        from fedloom.sims.engines.gpu_room import refuse_gpus

        refuse_gpus(config.engine)


def absolute_paths(config: Config) -> Config:
    """Return the configuration with absolute paths in data.root and domains, so that every worker finds them."""
    root = str(Path(config.data.root).resolve()) if config.data.root else ""
    data = dataclasses.replace(config.data, root=root)
    sites, population, network = _placed(config.sites), _placed(config.population), _started(config.network)
    return dataclasses.replace(config, data=data, sites=sites, population=population, network=network)


def _started(network: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section `network` with an absolute path in `start`."""
    start = network.get("start")
    return {**network, **({"start": str(Path(start).expanduser().resolve())} if isinstance(start, str) and start else {})}


def _placed(entries: Any) -> Any:
    """Return the entries with absolute paths in their domains. A number of sites stays unchanged."""
    if not isinstance(entries, list):
        return entries
    return [_entry(entry) for entry in entries]


def _entry(entry: Any) -> Any:
    own = dataclasses.asdict(entry) if isinstance(entry, SiteConfig) else entry
    changes: dict[str, Any] = {"domain": absolute(str(own["domain"]))}
    if own.get("network"):
        changes["network"] = _started(own["network"])
    if own.get("networks"):
        changes["networks"] = [_started(each) for each in own["networks"]]
    return dataclasses.replace(entry, **changes) if isinstance(entry, SiteConfig) else {**entry, **changes}
