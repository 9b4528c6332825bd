"""Write TensorBoard's event files: curves in tensorboard/PART, final results in tensorboard/results."""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from fedloom.conf import to_yaml
from fedloom.conf.schema import Config
from fedloom.sims.tracking.base import MAIN, TRACKERS, Line, Part, Tracker, Writer
from fedloom.sims.tracking.numbers import all_numbers
from fedloom.sims.tracking.results import Results

FOLDER, RESULTS = "tensorboard", "results"
MARK = "replies"  # the number of each round that is written last


@TRACKERS.register("tensorboard")
@dataclass(frozen=True)
class TensorBoardTracker(Tracker):
    """TensorBoard's event files in the run's folder; `tensorboard --logdir runs` shows all runs."""

    package: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"

    def open(self, config: Config) -> Writer:
        return TensorBoardWriter(config, self.sites)


class TensorBoardWriter(Writer):
    """Writes event files, a new one in each process. Its purge step hides rounds of earlier files after a rollback."""

    def begin(self, part: Part) -> Line:
        return TensorBoardLine(self.folder / FOLDER / part.name, part, self.sites, self.config)

    def results(self, results: Results) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder / FOLDER / RESULTS
        shutil.rmtree(folder, ignore_errors=True)
        with SummaryWriter(str(folder)) as events:
            for name, number in results.numbers.items():
                events.add_scalar(name, number, results.round)
            for table in results.tables:
                events.add_text(f"tables/{table.title}", table.markdown(), results.round)
            for path in results.pictures:
                with Image.open(path) as picture:
                    pixels = np.asarray(picture.convert("RGB"))
                events.add_image(f"plots/{path.stem}", pixels, results.round, dataformats="HWC")
            for name, digest in results.digest.items():
                events.add_text(f"digest/{name}", digest, results.round)


class TensorBoardLine(Line):
    """The curves of one part of a run. The main part also has the configuration, at round 0."""

    def __init__(self, folder: Path, part: Part, sites: set[str], config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        again = folder.is_dir()
        self.written = min(_written(folder), part.committed)
        self._sites = sites
        self._events = SummaryWriter(str(folder), purge_step=self.written + 1 if again else None)
        if part.name == MAIN and not again:
            text = "".join(f"    {line}\n" for line in to_yaml(config).splitlines())  # an indented block of Markdown
            self._events.add_text("configuration", text, 0)

    def write(self, record: dict[str, Any]) -> None:
        step, numbers = record["round"], all_numbers(record, self._sites)
        mark = numbers.pop(MARK, 0.0)
        for name, number in numbers.items():
            self._events.add_scalar(name, number, step)
        self._events.add_scalar(MARK, mark, step)
        self._events.flush()

    def close(self, status: str) -> None:
        self._events.close()


def _written(folder: Path) -> int:
    """Return the last complete round in the event files of earlier processes; 0 without any."""
    if not folder.is_dir():
        return 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = logging.getLogger("tensorboard")
    level = log.level
    log.setLevel(logging.ERROR)  # hide warnings about purged rounds
    try:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 1}).Reload()
    finally:
        log.setLevel(level)
    return max((event.step for event in events.Scalars(MARK)), default=0) if MARK in events.Tags()["scalars"] else 0
