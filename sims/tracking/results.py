"""Read the results of a run from its folder: metrics, tables, plots, digests."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.server.run_folder.folder import CONFIG, RunFolder
from fedloom.server.run_folder.scores import SCORES, headline
from fedloom.sims.report.headline import result_tables
from fedloom.sims.report.tables import Table
from fedloom.sims.tracking.numbers import one

REPORT = "report.html"


@dataclass(frozen=True)
class Results:
    """The results of a run, for trackers.

    Attributes:
        round: The last round.
        numbers: The first metric by names such as test/sum/union, others as test/auroc/sum/union.
        tables: The tables of the report.
        pictures: The files of the plots.
        digest: SHA-256 of the final states, by slot.
        files: The configuration and the report.
    """

    round: int
    numbers: dict[str, float]
    tables: list[Table]
    pictures: list[Path]
    digest: dict[str, str]
    files: list[Path]


def results_of(folder: Path) -> Results:
    """Return the results of the run in a folder. An unfinished run has only its configuration."""
    run = RunFolder(folder)
    summary, metrics = run.summary(), run.metrics()
    numbers = {
        **dict(_values("test", headline(summary))),
        **dict(_values("without", summary.get("forgotten"))),
    }
    for metric, values in list((summary.get(SCORES) or {}).items())[1:]:
        numbers |= dict(_values(f"test/{one(metric)}", values))
    files = [folder / name for name in (CONFIG, REPORT) if (folder / name).is_file()]
    pictures = sorted((folder / "plots").glob("*.png"))
    digest = {str(name): str(value) for name, value in (summary.get("digest") or {}).items()}
    tables = result_tables(summary) if summary else []
    return Results(max(metrics, default=0), numbers, tables, pictures, digest, files)


def _values(kind: str, values: Mapping[str, Mapping[str, Any]] | None) -> Iterator[tuple[str, float]]:
    for name, shares in (values or {}).items():
        for domain, share in shares.items():
            yield f"{kind}/{one(name)}/{one(domain)}", float(share)
