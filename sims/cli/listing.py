"""The list of runs in a folder: read from what lies there, without torch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.yamls import read_yaml
from server.runs import FINISHED, read_metrics, read_summary, runs_in, status
from server.written import CONFIG
from sims.report.tables import Cell, Table, before_forgetting, percent


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What is told of each run, by its path. Raises UserError if there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; name the one that holds runs, or its runs")
    return [row_of(path) for path in runs_in(folder)]


def row_of(path: Path) -> dict[str, Any]:
    """Of one run: status, method, seed, rounds that are done and to be done, accuracy on all domains, bytes on disk."""
    config, summary, metrics = read_yaml((path / CONFIG).read_text(encoding="utf-8")), read_summary(path), read_metrics(path)
    said, objective, strategy = status(path), config["objective"] or {}, config["strategy"] or {}
    method = "/".join(str(one) for one in (strategy.get("name"), objective.get("mode")) if one)
    watched = [record["accuracy"]["union"] for record in metrics.values() if (record.get("accuracy") or {}).get("union")]
    return {
        "run": str(path),
        "status": said,
        "method": str(summary.get("method") or method),
        "seed": config["seed"],
        "round": max(metrics, default=0),
        "rounds": summary.get("rounds") or config["rounds"],
        "test": before_forgetting(summary).get("union") if said == FINISHED else None,
        "validation": watched[-1] if watched else None,
        "bytes": size_of(path),
    }


def table(rows: Sequence[dict[str, Any]], folder: Path) -> Table:
    """The same for people."""
    shown: list[list[Cell]] = [
        [row["run"], row["status"], row["method"], str(row["seed"]), f"{row['round']}/{row['rounds']}",
         percent(row["test"]), percent(row["validation"]), megabytes(row["bytes"])] for row in rows
    ]  # fmt: skip
    note = "Accuracies on all domains together: on test images at the end, on validation images last. MB: on disk."
    columns = ["run", "status", "method", "seed", "rounds", "test", "validation", "MB"]
    return Table(f"Runs in {folder}", columns, shown, note)


def size_of(path: Path) -> int:
    """Bytes of all files in a folder, links not followed."""
    found = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                found += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # it has just gone
                continue
    return found


def megabytes(size: int) -> str:
    """A number of bytes in MB."""
    return f"{size / 1e6:.1f}"
