"""The content of a run's folder: the files that fedloom writes, and other files, which it never deletes."""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
STANDARDISATION = "standardisation.safetensors"  # data.standardise=sites: mean and deviation of each feature
DATA = "data.json"  # digests of the users' files
LOSSES = "losses.json"  # the sites' losses of the last round
TABLES = "tables.json"  # how the rows of the users' tables become inputs, by domain
LEDGER, SEAL, LOCK = "ledger.sqlite", "ledger.sha256", "ledger.lock"  # the run's server holds the lock
BASELINES, RETRAINED, CERTIFICATES = "baselines", "retrained", "certificates"
STATES, SITES, STAGING, BLOBS = "states", "sites", "staging", "blobs"
PLOTS, TABLE_FILES, REPORT = "plots", "tables", "report.html"
FINISHED = "finished"  # the status of a summary
APPLIED = ".applied.jsonl"  # beside the runs: all applied requests
TRACKERS = ("csv", "mlruns", "tensorboard", "wandb")  # folders of the built-in trackers; other trackers use their own name

WRITTEN = frozenset(
    {
        CONFIG,
        METRICS,
        SUMMARY,
        STANDARDISATION,
        DATA,
        LOSSES,
        TABLES,
        LEDGER,
        SEAL,
        LOCK,
        BASELINES,
        RETRAINED,
        CERTIFICATES,
        STATES,
        SITES,
        STAGING,
        BLOBS,
    }
    | {PLOTS, TABLE_FILES, REPORT, *TRACKERS, *(f"{LEDGER}-{part}" for part in ("wal", "shm", "journal"))}
)
SUFFIXES = {
    STATES: (".safetensors",),
    PLOTS: (".png", ".svg", ".pdf"),
    TABLE_FILES: (".csv", ".md", ".tex"),
    CERTIFICATES: (".json", ".html", ".sig"),
}  # of files in these folders
DESKTOPS = (".DS_Store", "Thumbs.db", "desktop.ini")
_LEFT = re.compile(r"\..+-[0-9a-f]{32}")
_TEMPORARY = re.compile(r"\.(?P<name>.+)(-[0-9a-f]{32}|\.new)")  # of an interrupted write


def strange_in(path: Path, tree: Mapping[str, Any]) -> list[str]:
    """Return the files and folders in a run's folder that fedloom does not write. `tree`: config.yaml (names trackers)."""
    own = WRITTEN | set(_trackers(tree))
    strange = [entry.name for entry in path.iterdir() if entry.name not in own and not _passing(entry.name)]
    return sorted([*strange, *_strange_inside(path)])


def _strange_inside(path: Path) -> Iterator[str]:
    """Yield such entries of the subfolders in which users may save their own files."""
    for folder, suffixes in SUFFIXES.items():
        for entry in (path / folder).iterdir() if (path / folder).is_dir() else ():
            passing = is_left(entry.name) or entry.name in DESKTOPS or entry.is_symlink()
            if not passing and (entry.is_dir() or entry.suffix not in suffixes):
                yield f"{folder}/{entry.name}"
    for folder in (BASELINES, RETRAINED):
        for run in (path / folder).iterdir() if (path / folder).is_dir() else ():
            inside = strange_in(run, {}) if run.is_dir() else []
            yield from (f"{folder}/{run.name}/{name}" for name in inside)


def delete(folder: Path, name: str) -> None:
    """Delete a file or folder of the run in `folder`. In the folders of SUFFIXES, files with other endings stay."""
    path = folder / name
    if not path.is_dir():
        path.unlink()
    elif name not in SUFFIXES:
        shutil.rmtree(path)
    else:
        for entry in path.iterdir():
            if (entry.suffix in SUFFIXES[name] or _passing(entry.name) or is_left(entry.name)) and not entry.is_dir():
                entry.unlink()
        if not any(path.iterdir()):
            path.rmdir()


def is_left(name: str) -> bool:
    """Return whether a file of that name was left by an interrupted write (clients.storage.states.write_bytes)."""
    return bool(_LEFT.fullmatch(name))


def is_begun(path: Path) -> bool:
    """Return whether a run has begun in the folder: it has a ledger, metrics or a summary."""
    return any((path / name).is_file() for name in (LEDGER, METRICS, SUMMARY))


def holds_only_config(path: Path) -> bool:
    """Return whether the folder has only a configuration, and files of interrupted writes."""
    return all(entry.name == CONFIG or _passing(entry.name) for entry in path.iterdir())


def _passing(name: str) -> bool:
    """Return whether the name is of an interrupted write, or of a desktop's hidden file."""
    match = _TEMPORARY.fullmatch(name)
    return name in DESKTOPS or bool(match and match["name"] in WRITTEN)


def _trackers(tree: Mapping[str, Any]) -> Iterator[str]:
    tracking = tree.get("tracking")
    for entry in tracking if isinstance(tracking, list) else []:
        name = entry.get("name") if isinstance(entry, dict) else entry
        if isinstance(name, str):
            yield name
