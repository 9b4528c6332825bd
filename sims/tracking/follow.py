"""Pass the events of a run to its trackers."""

import copy
import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedloom.conf.errors import UserError, public
from fedloom.conf.plugins import error_summary
from fedloom.conf.schema import Config
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.listener import Silent
from fedloom.server.run_folder.folder import RunFolder
from fedloom.sims.tracking.base import FAILED, FINISHED, INTERRUPTED, MAIN, TRACKERS, Part, Tracker
from fedloom.sims.tracking.courier import Courier
from fedloom.sims.tracking.results import results_of

SECONDS_AT_END, SECONDS_AFTER_STOP = 60.0, 10.0  # the longest wait for trackers
BESIDE = ("baselines", "retrained")  # folders of other parts


def trackers_of(config: Config) -> dict[str, Tracker]:
    """Return the configuration's trackers by name. Raise UserError for unknown or repeated names, and wrong options."""
    trackers: dict[str, Tracker] = {}
    for index, entry in enumerate(config.tracking):
        where = f"tracking[{index}]"
        if not isinstance(entry, str | dict):
            raise UserError(
                f"{where}: got {entry!r}, takes a name such as csv, or a section such as {{name: mlflow, uri: ...}}"
            )
        section = {"name": entry} if isinstance(entry, str) else entry
        tracker = TRACKERS.build(section, where)
        _refuse_passwords(tracker, where)
        if section["name"] in trackers:
            raise UserError(f"{where}: '{section['name']}' appears twice; leave one out")
        trackers[section["name"]] = tracker
    return trackers


def _refuse_passwords(tracker: Tracker, where: str) -> None:
    """Raise UserError for a URL with a password, or over HTTP with a user: config.yaml, report and ledger would show it."""
    for field in dataclasses.fields(tracker):
        value = getattr(tracker, field.name)
        user = value.removesuffix(public(value).partition("://")[2]) if isinstance(value, str) else ""
        if user.endswith("@") and (value.startswith("http") or ":" in user.partition("://")[2]):
            raise UserError(f"{where}.{field.name}: has a password or a user's name, which the run's files would show; "
                            "remove it from the URL, and set the tracker's environment variables, such as "
                            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")  # fmt: skip


def refuse_trackers(config: Config) -> None:
    """Raise UserError for a tracker that cannot work, such as one without its package. No package is imported."""
    for index, (name, tracker) in enumerate(trackers_of(config).items()):
        if tracker.package and not _installed(tracker.package):
            how = f"pip install 'fedloom[{tracker.extra}]'" if tracker.extra else f"pip install {tracker.package}"
            raise UserError(
                f"tracking[{index}]: '{name}' needs the package '{tracker.package}', which is not installed: {how}"
            )


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # its parent is missing, or not a package
        return False


def trackable(config: Config, say: Callable[[str], None]) -> Config:
    """Return the configuration, without trackers if one of them cannot work. `say` is called with the reason."""
    try:
        refuse_trackers(config)
    except UserError as error:
        say(f"{error}; nothing is tracked")
        return dataclasses.replace(config, tracking=[])
    return config


class Tracking(Silent):
    """The trackers of one run. Enter this context before the run, and leave it when the report is written.

    `say` is called with a line for each tracker that fails. A tracker's errors are never raised.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._say, self._folder = say, (Path(config.run.root) / config.run.name).resolve()
        self._couriers = [
            Courier(name, lambda tracker=tracker: tracker.open(config)) for name, tracker in trackers_of(config).items()
        ]
        self._parts: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._couriers:
            return
        if kind is None:
            self._guarded(self._results)
            self._close(FINISHED, SECONDS_AT_END)
        elif issubclass(kind, Exception):
            self._close(FAILED, SECONDS_AT_END)
        else:
            self._close(INTERRUPTED, SECONDS_AFTER_STOP)

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        if self._couriers:
            self._guarded(lambda: self._part(Path(note)))

    def round_done(self, record: dict[str, Any]) -> None:
        self._tell("round", record)

    def _part(self, folder: Path) -> None:
        """Announce a part and all its committed rounds: a tracker may lack some of them."""
        within = folder.resolve().relative_to(self._folder)
        name = within.as_posix() if within.parts else MAIN
        records = list(RunFolder(folder).metrics().values())
        with Ledger.open(folder, server=False) as ledger:
            again = sum(event.kind == "rolled back" for event in ledger.events())
            id = "-".join(filter(None, [ledger.run().run, "" if name == MAIN else name, str(again or "")]))
        self._parts.add(folder.resolve())
        self._tell("part", Part(name, id, max((each["round"] for each in records), default=0)), records)

    def _results(self) -> None:
        """Send the final results, after the parts that an earlier process finished."""
        if not (self._folder / "summary.json").is_file():
            return
        others = [path for name in BESIDE for path in sorted((self._folder / name).glob("*"))]
        for folder in [self._folder, *others]:
            if folder not in self._parts and folder.is_dir():
                self._part(folder)
        self._tell("results", results_of(self._folder))

    def _close(self, status: str, seconds: float) -> None:
        if self._parts:
            self._tell("close", status)
            for courier in self._couriers:
                courier.wait(seconds)
            self._news()

    def _tell(self, call: str, *arguments: Any) -> None:
        """Queue a call for each tracker, with its own copy of the arguments."""
        for courier in self._couriers:
            courier.tell(call, *copy.deepcopy(arguments))
        self._news()

    def _news(self) -> None:
        for courier in self._couriers:
            if line := courier.news():
                self._say(line)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Call `step`. An error stops all trackers."""
        try:
            step()
        except Exception as error:
            for courier in self._couriers:
                courier.failure = courier.failure or error_summary(error)
            self._news()
