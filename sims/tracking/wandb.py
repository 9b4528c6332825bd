"""Write to Weights & Biases: a run for each part, in one group; by default offline in the run's folder (wandb)."""

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from fedloom.conf.schema import Config
from fedloom.conf.typed import option
from fedloom.sims.report.tables import show
from fedloom.sims.tracking.base import FINISHED, MAIN, TRACKERS, Line, Part, Tracker, Writer
from fedloom.sims.tracking.numbers import all_numbers
from fedloom.sims.tracking.results import Results
from fedloom.sims.tracking.wandb_files import last_number

FOLDER, STEP = "wandb", "round"


@TRACKERS.register("wandb")
@dataclass(frozen=True)
class WandbTracker(Tracker):
    """Weights & Biases, by default offline in the run's folder.

    Set an account's key in WANDB_API_KEY, or with `wandb login`.
    """

    package: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"
    project: str = option("fedloom", "name of W&B's project")
    entity: str = option("", "user or team that owns the project; empty: the account")
    mode: str = option(
        "offline", "offline: files for `wandb sync`; online: sent during the run", choices=("offline", "online")
    )

    def open(self, config: Config) -> Writer:
        return WandbWriter(config, self)


class WandbWriter(Writer):
    """Writes a W&B run for each part. After a rollback, a new one gets all committed rounds; the old one stays."""

    def __init__(self, config: Config, options: WandbTracker) -> None:
        super().__init__(config, options.sites)
        self._options = options
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

    def begin(self, part: Part) -> "WandbLine":
        import wandb

        id, options = re.sub(r"[^A-Za-z0-9_-]", "-", part.id), self._options
        tree = {key: item for key, item in dataclasses.asdict(self.config).items() if key not in ("run", "tracking")}
        written = last_number(self.folder / FOLDER, id, STEP)
        (self.folder / FOLDER).mkdir(exist_ok=True)
        run = wandb.init(
            project=options.project,
            entity=options.entity or None,
            mode=options.mode,  # pyright: ignore[reportArgumentType]
            dir=str(self.folder),
            id=id,
            name=self.config.run.name if part.name == MAIN else f"{self.config.run.name}/{part.name}",
            group=self.config.run.name,
            job_type=part.name,
            config=tree,
            resume="allow",
            reinit="create_new",  # leave the user's own W&B run alone
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        run.define_metric("*", step_metric=STEP)
        return WandbLine(run, written, self.sites)

    def results(self, results: Results) -> None:
        import wandb

        line = self.lines[MAIN]
        assert isinstance(line, WandbLine)
        pictures = {f"plots/{path.stem}": wandb.Image(str(path)) for path in results.pictures}
        tables = {
            f"tables/{table.title}": wandb.Table(columns=list(table.columns), data=[[*map(show, row)] for row in table.rows])
            for table in results.tables
        }
        if pictures or tables:
            line.run.log({**pictures, **tables}, step=results.round)
        line.run.summary.update({**results.numbers, **{f"digest/{name}": digest for name, digest in results.digest.items()}})


class WandbLine(Line):
    """The W&B run of one part."""

    def __init__(self, run: Any, written: int, sites: set[str]) -> None:
        self.run, self.written, self._sites = run, written, sites

    def write(self, record: dict[str, Any]) -> None:
        self.run.log({STEP: record["round"], **all_numbers(record, self._sites)}, step=record["round"])

    def close(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == FINISHED else 1)
