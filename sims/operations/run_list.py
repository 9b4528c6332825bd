"""The list of runs in a folder: read from what lies there, without torch."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.formatting import count
from fedloom.conf.yaml_text import read_yaml
from fedloom.server.run_folder.layout import CONFIG, FINISHED
from fedloom.server.run_folder.listing import runs_in, status, waiting
from fedloom.server.run_folder.results_schema import checked_metrics, checked_summary
from fedloom.sims.report.tables import Cell, Table, before_forgetting, percent

MOST_NAMED = 3  # requests of a run


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What is told of each run, by its path. Raises UserError if there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; name the one that holds runs, or its runs")
    return [row_of(path) for path in runs_in(folder)]


def row_of(path: Path) -> dict[str, Any]:
    """Of one run: status, method, seed, rounds that are done and to be done, accuracy on all domains, bytes on disk."""
    config, state, odd = read_yaml((path / CONFIG).read_text(encoding="utf-8")), status(path), []
    summary, metrics = (_read(read, path, odd) for read in (checked_summary, checked_metrics))
    method = "/".join(
        str(name) for name in (_option(config["strategy"], "name"), _option(config["objective"], "mode")) if name
    )
    forgotten = summary.get("unlearned") or []
    unions = [(record.get("accuracy") or {}).get("union") for record in metrics.values()]
    validation = [union for union in unions if union is not None]
    return {
        "run": str(path),
        "status": state,
        "method": str(summary.get("method") or method),
        "seed": config["seed"],
        "round": max(metrics, default=0),
        "rounds": summary.get("rounds") or config["rounds"],
        "test": before_forgetting(summary).get("union") if state == FINISHED else None,
        "validation": validation[-1] if validation and not forgotten else None,  # of the network that had them
        "forgotten": forgotten,
        "waiting": waiting(path),
        "bytes": size_of(path),
        **({"odd": odd} if odd else {}),
    }


def _read(read: Callable[[Path], dict[Any, Any]], path: Path, odd: list[str]) -> dict[Any, Any]:
    """What is read of a run; nothing, and a line in `odd`, where no sense can be made of it."""
    try:
        return read(path)
    except UserError as error:
        odd.append(str(error))
        return {}


def _option(section: Any, key: str) -> Any:
    """An option in a section of a configuration, which may be a name alone, or anything that somebody wrote there."""
    return section.get(key) if isinstance(section, Mapping) else section if key == "name" else None


def table(rows: Sequence[dict[str, Any]], folder: Path) -> Table:
    """The same for people."""
    shown: list[list[Cell]] = [
        [row["run"], _standing(row), row["method"], str(row["seed"]), f"{row['round']}/{row['rounds']}",
         percent(row["test"]), percent(row["validation"]), megabytes(row["bytes"])] for row in rows
    ]  # fmt: skip
    note = "Accuracies on all domains together: on test images at the end, on validation images last. MB: on disk."
    columns = ["run", "status", "method", "seed", "rounds", "test", "validation", "MB"]
    return Table(f"Runs in {folder}", columns, shown, note)


def _standing(row: Mapping[str, Any]) -> str:
    """Status, how many sites have been forgotten, and which requests wait."""
    parts = [row["status"]]
    parts += [f"{count(many, 'site')} forgotten"] if (many := len(row["forgotten"])) else []
    parts += [f"request {id} waits" for id in row["waiting"][:MOST_NAMED]]
    parts += [f"{more} more wait"] if (more := len(row["waiting"]) - MOST_NAMED) > 0 else []
    return ", ".join(parts)


def size_of(path: Path) -> int:
    """Bytes of all files in a folder, links not followed."""
    size = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                size += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # it has just gone
                continue
    return size


def megabytes(size: int) -> str:
    """A number of bytes in MB."""
    return f"{size / 1e6:.1f}"
