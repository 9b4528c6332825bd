"""List the runs in a folder from their files, without torch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError, plain
from fedloom.conf.formatting import count
from fedloom.conf.machine import size_of
from fedloom.conf.metrics import ACCURACY, facts_of
from fedloom.conf.yaml_text import read_yaml
from fedloom.server.run_folder.layout import CONFIG, FINISHED
from fedloom.server.run_folder.listing import RUNNING, searched, status, waiting
from fedloom.server.run_folder.results_schema import checked_metrics, checked_summary, summary_fault
from fedloom.server.run_folder.scores import headline, metric_of
from fedloom.sims.report.results import shown, which
from fedloom.sims.report.tables import Cell, Table

DAMAGED = "damaged"  # the status of a run with a file that cannot be read
WHOLE = ("seed", "rounds")  # keys of config.yaml that are whole numbers
CORRECT = "restore it from a backup, or delete this folder"
MOST_VALUE = 60  # characters of a wrong value
MOST_NAMED = 3  # waiting requests in a row


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each run, also for damaged ones, sorted by path. Raises UserError if the folder does not exist."""
    if not folder.is_dir():
        raise UserError(f"{folder}: the folder does not exist; name a run, or a folder that contains runs")
    rows = [damaged_row(path, fault) if fault else row_of(path) for path, fault in searched(folder)]
    return sorted(rows, key=lambda row: Path(row["run"]))


def row_of(path: Path) -> dict[str, Any]:
    """Return the status, method, seed, finished and planned rounds, first metric on all domains and bytes of a run."""
    config, odd = read_yaml((path / CONFIG).read_text(encoding="utf-8")), list[str]()
    state = DAMAGED if summary_fault(path) and status(path) != RUNNING else status(path)
    summary, metrics = (_read(read, path, odd) for read in (checked_summary, checked_metrics))
    if wrong := [f"{key}: {plain(repr(config[key]))}"[:MOST_VALUE] for key in WHOLE if type(config[key]) is not int]:
        state, config = DAMAGED, {**config, **dict.fromkeys(WHOLE)}
        odd.append(f"{path / CONFIG}: has {', '.join(wrong)}, takes whole numbers; {CORRECT}")
    method = "/".join(
        str(name) for name in (_option(config["strategy"], "name"), _option(config["objective"], "mode")) if name
    )
    forgotten = summary.get("unlearned") or []
    unions = [headline(record).get("union") for record in metrics.values()]
    metric = metric_of(summary, metrics.values())
    validation = [union for union in unions if union is not None]
    return {
        "run": str(path),
        "status": state,
        "method": str(summary.get("method") or method),
        "seed": config["seed"],
        "round": max(metrics, default=0),
        "rounds": config["rounds"] and (summary.get("rounds") or config["rounds"]),
        "test": shown(summary).get("union") if state == FINISHED else None,
        **({"which": best} if state == FINISHED and (best := which(summary)) else {}),
        "validation": validation[-1]
        if validation and not forgotten
        else None,  # forgetting changes the network after it was measured
        **({"metric": metric.name} if metric.name != ACCURACY else {}),
        "forgotten": forgotten,
        "waiting": waiting(path),
        "bytes": size_of(path),
        **({"odd": odd} if odd else {}),
    }


def damaged_row(path: Path, fault: str) -> dict[str, Any]:
    """Return the row of a run whose config.yaml cannot be read. `fault`: a line that says why."""
    unknown = dict.fromkeys(("seed", "rounds", "test", "validation"))
    return {"run": str(path), "status": DAMAGED, "method": "", "round": 0, **unknown, "forgotten": [],
            "waiting": waiting(path), "bytes": size_of(path), "odd": [fault]}  # fmt: skip


def _read(read: Callable[[Path], dict[Any, Any]], path: Path, odd: list[str]) -> dict[Any, Any]:
    """Return what `read` reads of a run. For damaged files, return {} and append a line to `odd`."""
    try:
        return read(path)
    except UserError as error:
        odd.append(str(error))
        return {}


def _option(section: Any, key: str) -> Any:
    """Return an option of a section. A section may also be a name alone, or anything that a user wrote there."""
    return section.get(key) if isinstance(section, Mapping) else section if key == "name" else None


def table(rows: Sequence[dict[str, Any]], folder: Path) -> Table:
    """Return the rows of `rows_of` as a table."""
    several = any("metric" in row for row in rows)
    cells: list[list[Cell]] = [
        [row["run"], _standing(row), row["method"], *_progress(row),
         *([facts_of(row.get("metric", ACCURACY)).title] if several else []),
         _shown(row, "test"), _shown(row, "validation"), megabytes(row["bytes"])] for row in rows
    ]  # fmt: skip
    what = "The metric" if several else "Accuracy"
    note = f"{what} on all domains together. test: at the end. validation: at the last measured round. MB: size on disk."
    columns = ["run", "status", "method", "seed", "rounds", *(["metric"] if several else []), "test", "validation", "MB"]
    return Table(f"Runs in {folder}", columns, cells, note)


def _progress(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the seed and the rounds as text; "-" for a run whose configuration cannot be read."""
    return ("-", "-") if row["rounds"] is None else (str(row["seed"]), f"{row['round']}/{row['rounds']}")


def _shown(row: Mapping[str, Any], key: str) -> str:
    """Return a row's value as text, and which network it is of, if it is not the last one."""
    best = f" ({row['which']})" if key == "test" and "which" in row else ""
    return facts_of(row.get("metric", ACCURACY)).text(row[key]) + best


def _standing(row: Mapping[str, Any]) -> str:
    """Return the status, the number of forgotten sites, and the requests that wait."""
    parts = [row["status"]]
    parts += [f"{count(many, 'site')} forgotten"] if (many := len(row["forgotten"])) else []
    parts += [f"request {id} waits" for id in row["waiting"][:MOST_NAMED]]
    parts += [f"{more} more wait"] if (more := len(row["waiting"]) - MOST_NAMED) > 0 else []
    return ", ".join(parts)


def megabytes(size: int) -> str:
    """Return a number of bytes as text, in MB."""
    return f"{size / 1e6:.1f}"
