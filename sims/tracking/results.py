"""What came out of a run, as its folder has it: accuracies, tables, pictures, digests."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.server.run_folder.folder import CONFIG, RunFolder
from fedloom.sims.report.results import result_tables
from fedloom.sims.report.tables import Table
from fedloom.sims.tracking.numbers import one

REPORT = "report.html"


@dataclass(frozen=True)
class Results:
    """`numbers`: by names such as test/sum/union, fractions of 1; `digest`: of the final states, sha256."""

    round: int
    numbers: dict[str, float]
    tables: list[Table]
    pictures: list[Path]
    digest: dict[str, str]
    files: list[Path]


def results_of(folder: Path) -> Results:
    """Those of the run in a folder; without a summary there are none but its configuration."""
    run = RunFolder(folder)
    summary, metrics = run.summary(), run.metrics()
    numbers = {
        **dict(_accuracies("test", summary.get("accuracy"))),
        **dict(_accuracies("without", summary.get("forgotten"))),
    }
    files = [folder / name for name in (CONFIG, REPORT) if (folder / name).is_file()]
    pictures = sorted((folder / "plots").glob("*.png"))
    digest = {str(name): str(value) for name, value in (summary.get("digest") or {}).items()}
    tables = result_tables(summary) if summary else []
    return Results(max(metrics, default=0), numbers, tables, pictures, digest, files)


def _accuracies(kind: str, given: Mapping[str, Mapping[str, Any]] | None) -> Iterator[tuple[str, float]]:
    for name, shares in (given or {}).items():
        for domain, share in shares.items():
            yield f"{kind}/{one(name)}/{one(domain)}", float(share)
