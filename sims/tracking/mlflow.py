"""Write to MLflow: a run for each part, with baselines as children; by default in the run's folder (mlruns)."""

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedloom.conf.schema import Config
from fedloom.conf.typed import option
from fedloom.sims.tracking.base import FAILED, FINISHED, INTERRUPTED, MAIN, TRACKERS, Line, Part, Tracker, Writer
from fedloom.sims.tracking.numbers import all_numbers, safe, settings
from fedloom.sims.tracking.results import Results

if TYPE_CHECKING:
    from mlflow import MlflowClient

FOLDER = "mlruns"
ID = "fedloom.id"  # the tag that identifies the run for a later process
MARK = "round"  # the number of each round that is written last
MOST_NUMBERS, MOST_SETTINGS, MOST_LETTERS = 1000, 100, 500  # in one request; characters of a setting
STATUS = {FINISHED: "FINISHED", INTERRUPTED: "KILLED", FAILED: "FAILED"}


@TRACKERS.register("mlflow")
@dataclass(frozen=True)
class MlflowTracker(Tracker):
    """MLflow, by default in the run's folder.

    Set a server's password in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    """

    package: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"
    uri: str = option("", "URI of the tracking server or store; empty: the folder mlruns in the run's folder")
    experiment: str = option("", "name of MLflow's experiment; empty: the name of this experiment")

    def open(self, config: Config) -> Writer:
        return MlflowWriter(config, self)


class MlflowWriter(Writer):
    """Writes an MLflow run for each part. After a rollback, a new one gets all committed rounds; the old one stays."""

    def __init__(self, config: Config, options: MlflowTracker) -> None:
        super().__init__(config, options.sites)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # read when a store is opened
        from mlflow import MlflowClient

        self._client = MlflowClient(
            tracking_uri=os.path.expanduser(options.uri) or (self.folder.resolve() / FOLDER).as_uri()
        )
        self._experiment = _experiment(self._client, safe(options.experiment or config.experiment))

    def begin(self, part: Part) -> "MlflowLine":
        earlier = self._client.search_runs([self._experiment], f"tags.`{ID}` = '{safe(part.id)}'", max_results=1)
        if earlier:
            self._client.update_run(earlier[0].info.run_id, status="RUNNING")
            return MlflowLine(self._client, earlier[0].info.run_id, self.sites)
        main = self.lines.get(MAIN)
        tags = {ID: safe(part.id), **({"mlflow.parentRunId": main.id} if isinstance(main, MlflowLine) else {})}
        name = self.config.run.name if part.name == MAIN else f"{self.config.run.name}/{part.name}"
        run = self._client.create_run(self._experiment, run_name=name, tags=tags).info.run_id
        self._settings(run)
        return MlflowLine(self._client, run, self.sites)

    def _settings(self, run: str) -> None:
        from mlflow.entities import Param

        params = [Param(safe(name), text[:MOST_LETTERS]) for name, text in settings(self.config).items()]
        for start in range(0, len(params), MOST_SETTINGS):
            self._client.log_batch(run, params=params[start : start + MOST_SETTINGS])

    def results(self, results: Results) -> None:
        line = self.lines[MAIN]
        assert isinstance(line, MlflowLine)
        line.log(results.numbers, results.round)
        for path in results.files:
            self._client.log_artifact(line.id, str(path))
        for path in results.pictures:
            self._client.log_artifact(line.id, str(path), "plots")
        for table in results.tables:
            self._client.log_text(line.id, table.markdown(), f"tables/{safe(table.title.replace('/', ' '))}.md")
        for name, digest in results.digest.items():
            self._client.set_tag(line.id, safe(f"digest.{name}"), digest)


class MlflowLine(Line):
    """The MLflow run of one part."""

    def __init__(self, client: "MlflowClient", id: str, sites: set[str]) -> None:
        self.id, self._client, self._sites = id, client, sites
        self.written = max((point.step for point in client.get_metric_history(id, MARK)), default=0)
        self._torn = self.written + 1  # an earlier process may have stopped within this round

    def write(self, record: dict[str, Any]) -> None:
        numbers = all_numbers(record, self._sites)
        self.log({**numbers, MARK: float(record["round"])}, record["round"], again=record["round"] == self._torn)

    def log(self, numbers: dict[str, float], step: int, again: bool = True) -> None:
        """Add each number to its curve at `step`. `again`: some points may exist; add only the missing ones."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        points = [Metric(safe(name), number, now, step) for name, number in numbers.items()]
        if again and (present := self._client.get_run(self.id).data.metrics.keys()):
            points = [point for point in points if point.key not in present or not self._holds(point)]
        for start in range(0, len(points), MOST_NUMBERS):
            self._client.log_batch(self.id, metrics=points[start : start + MOST_NUMBERS])

    def _holds(self, point: Any) -> bool:
        """Return whether the curve's latest point at this step has this value."""
        values = [other.value for other in self._client.get_metric_history(self.id, point.key) if other.step == point.step]
        return values[-1:] == [point.value]

    def close(self, status: str) -> None:
        self._client.set_terminated(self.id, STATUS[status])


def _experiment(client: "MlflowClient", name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    return experiment.experiment_id if experiment else client.create_experiment(name)
