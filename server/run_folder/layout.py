"""The content of a run's folder: the files that fedloom writes, and other files, which it never deletes."""

import contextlib
import json
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
WRITTEN_NAMES = "written.json"  # the files that fedloom wrote in the folders of SUFFIXES; others there are the user's
COMPARED = "compared.json"  # next to comparison pages: the runs that they show
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
        WRITTEN_NAMES,
        COMPARED,
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
    for folder in SUFFIXES:
        own = set(own_in(path, folder))
        for entry in (path / folder).iterdir() if is_folder(path / folder) else ():
            if entry not in own and not entry.is_symlink():
                yield f"{folder}/{entry.name}"
    for folder in (BASELINES, RETRAINED):
        for run in (path / folder).iterdir() if is_folder(path / folder) else ():
            if is_folder(run):
                yield from (f"{folder}/{run.name}/{name}" for name in strange_in(run, {}))
            elif not (_passing(run.name) or run.is_symlink()):
                yield f"{folder}/{run.name}"


def own_in(path: Path, folder: str) -> list[Path]:
    """Return the files that fedloom wrote in a folder of SUFFIXES, with those of interrupted writes and of desktops.

    These are the files of `noted`; in a run of an earlier version, which has no notes on this folder, all files with the
    endings in SUFFIXES.
    """
    known = noted(path)
    known = known if notes_on(known, folder) else None
    files = [entry for entry in (path / folder).iterdir() if not entry.is_dir()] if (path / folder).is_dir() else []
    return [file for file in files if is_left(file.name) or _passing(file.name)
            or (f"{folder}/{file.name}" in known if known is not None else file.suffix in SUFFIXES[folder])]  # fmt: skip


def notes_on(known: set[str] | None, folder: str) -> bool:
    """Return whether the notes name all files in a folder of SUFFIXES. Those of earlier versions name plots and tables."""
    return known is not None and (folder in (PLOTS, TABLE_FILES) or f"{folder}/" in known)


def noted(path: Path) -> set[str] | None:
    """Return the files and folders of RunFolder.note_written; None if the run has no notes, or damaged ones."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        names = json.loads((path / WRITTEN_NAMES).read_text(encoding="utf-8"))
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return set(names)
    return None


def delete(folder: Path, name: str) -> None:
    """Delete a file or folder of the run in `folder`. Files that fedloom did not write stay, and the folders around them."""
    path = folder / name
    if not is_folder(path):
        path.unlink()
    elif name in SUFFIXES:
        for file in own_in(folder, name):
            file.unlink()
    elif name == BASELINES:
        for run in [run.name for run in path.iterdir() if is_folder(run)]:
            _delete_run(path / run)
    elif Path(name).parent.name == RETRAINED:
        _delete_run(path)
    else:
        shutil.rmtree(path)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def is_folder(path: Path) -> bool:
    """Return whether the path is a folder itself. A link to one may lead to anyone's files, which are never deleted."""
    return path.is_dir() and not path.is_symlink()


def links_in(path: Path) -> Iterator[Path]:
    """Yield the links in place of what `delete` would remove: the path, the runs inside it, and their files and folders."""
    runs = [path, *(path.iterdir() if path.name == BASELINES and is_folder(path) else ())]
    parts = [run / name for run in runs if run.parent.name in (BASELINES, RETRAINED) for name in sorted(WRITTEN)]
    yield from (part for part in (*runs, *parts) if part.is_symlink())


def _delete_run(path: Path) -> None:
    """Delete a run inside a run."""
    strange = strange_in(path, {})
    for name in [entry.name for entry in path.iterdir() if entry.name not in strange]:
        delete(path, name)
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
