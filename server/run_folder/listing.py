"""Folders of runs on disk: which folders are runs, and their status. It does not import torch, so long lists are fast."""

import contextlib
import dataclasses
import functools
import json
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import portalocker
import yaml

from fedloom.conf.errors import UserError, plain
from fedloom.conf.loading import from_mapping
from fedloom.conf.schema import Config, RunConfig
from fedloom.conf.text_keys import keep_texts
from fedloom.conf.yaml_text import read_json, read_yaml
from fedloom.server.run_folder.layout import (
    APPLIED,
    CONFIG,
    FINISHED,
    LEDGER,
    LOCK,
    METRICS,
    SEAL,
    SUMMARY,
    holds_only_config,
    is_begun,
    strange_in,
)

KEYS = {"experiment", "seed", "rounds", "sites", "population", "network", "objective", "strategy", "baselines", "run",
        "engine", "data", "training", "federation", "evaluation"}  # in every run's config.yaml, since version 1  # fmt: skip
MAX_LISTED = 5  # names in an error message
MOST_PARSED = 4096  # configurations in memory
MOST_DEPTH = 4  # levels of folders that are searched for runs
EMPTY = "is empty"  # the fault of a file
RUNNING, STOPPED = "running", "stopped"
ENDED = (FINISHED, "failed", "interrupted")  # the status in a summary


def is_run(path: Path) -> bool:
    """Return whether the folder is a run, judged by the keys of its config.yaml."""
    return bool(_tree(path))


def _tree(path: Path) -> dict[str, Any]:
    """Return the content of a run's config.yaml; empty if the folder is not a run."""
    try:
        found = (path / CONFIG).stat()
    except OSError:
        return {}
    if not stat.S_ISREG(found.st_mode):  # such as a pipe, which would block
        return {}
    return _parsed(path.absolute(), found.st_mtime_ns, found.st_size, found.st_ino)


@functools.lru_cache(maxsize=MOST_PARSED)
def _parsed(path: Path, *_: int) -> dict[str, Any]:
    """Return a run's config.yaml, parsed again only if the file has changed: programs that follow runs list them often."""
    try:
        tree = read_yaml((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) and tree.keys() >= KEYS else {}


def refuse_deleting(path: Path, *, to: str, alone: bool = False) -> None:
    """Raise UserError unless everything in the folder belongs to a run.

    `to`: what will be done, for the message. `alone`: a configuration alone is enough.
    """
    if fault := config_fault(path):
        raise UserError(fault)
    if not (tree := _tree(path)):
        raise UserError(f"{path} is not a run of fedloom (by its {CONFIG}); it will not be {to}")
    if strange := strange_in(path, tree):
        more = f" and {len(strange) - MAX_LISTED} more" if len(strange) > MAX_LISTED else ""
        names = ", ".join(plain(name) for name in strange[:MAX_LISTED]) + more
        raise UserError(f"{path} has files that fedloom did not write ({names}); it will not be {to}. Move them away first")
    if not is_begun(path) and not (alone and holds_only_config(path)):
        raise UserError(f"{path} is not a run of fedloom (without {LEDGER}, {METRICS}, {SUMMARY}); it will not be {to}")


def runs_in(path: Path, depth: int = MOST_DEPTH) -> Iterator[Path]:
    """Yield the folder itself if it is a run, else all runs in it, by name. Baselines belong to their run."""
    return (folder for folder, fault in searched(path, depth) if not fault)


def searched(path: Path, depth: int = MOST_DEPTH) -> Iterator[tuple[Path, str]]:
    """Yield the runs of `runs_in` and those that are damaged, each with a line on its config.yaml; empty for a sound one."""
    if is_run(path):
        yield path, ""
    elif fault := config_fault(path):
        yield path, fault
    elif depth:
        with contextlib.suppress(OSError):  # unreadable, or just removed
            for inner in sorted(path.iterdir()):
                if inner.is_dir() and not inner.name.startswith("."):
                    yield from searched(inner, depth - 1)


def config_fault(path: Path) -> str:
    """Return a line on the config.yaml of a run that cannot be read; empty for a run, and for a folder without one."""
    file, own = path / CONFIG, any((path / name).is_file() for name in (LEDGER, SEAL))
    if is_run(path) or not (own or (file.exists() and any((path / name).exists() for name in (METRICS, SUMMARY)))):
        return ""
    text, fault = text_of(file)
    if not fault:
        try:
            tree = read_yaml(text)
            if isinstance(tree, dict) and not own and "experiment" not in tree:
                return ""  # another program's
            lacking = sorted(KEYS - tree.keys()) if isinstance(tree, dict) else []
            fault = f"lacks {', '.join(lacking[:MAX_LISTED])}" if lacking else "is not a configuration"
        except (RecursionError, yaml.YAMLError) as error:
            mark = getattr(error, "problem_mark", None)
            fault = f"is not valid YAML (line {mark.line + 1})" if mark else "is not valid YAML"
    return f"{file}: {fault}; restore it from a backup, or delete this folder"


def text_of(file: Path) -> tuple[str, str]:
    """Return a text file's content, and its fault; empty for a sound file."""
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            return "", "is not a regular file"
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return "", "is missing"
    except IsADirectoryError:
        return "", "is a folder"
    except OSError as error:
        return "", f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        return "", "is not UTF-8 text"
    return text, "" if text.strip() else EMPTY


def refuse_existing(config: Config, path: Path | None = None) -> None:
    """Raise UserError if a run of that name exists, unless it is the one to resume, or run.overwrite is set."""
    path = path or Path(config.run.root) / config.run.name
    if not path.exists():
        pass
    elif config.run.resume:
        _same_run(config, path)
    elif not config.run.overwrite:
        refuse_other(path)
        raise UserError(f"the run '{config.run.name}' exists ({path}): add --overwrite, or set another run.name=")
    else:
        with contextlib.suppress(FileNotFoundError):  # another process has just moved it away to overwrite it
            refuse_deleting(path, to="overwritten", alone=True)


def refuse_other(path: Path) -> None:
    """Raise UserError for a file or folder that is not a run, so that --overwrite would not replace it."""
    if not is_run(path) and not config_fault(path) and path.exists():  # another process may have moved it away
        raise UserError(f"{path}: exists, and holds no run of fedloom; set another run.name=, or move it away")


def read_config(path: Path) -> Config:
    """Return the configuration of the run in a folder, with its current location. Raises UserError if it is not a run."""
    if not is_run(path):
        raise UserError(f"{path}: is not a run of fedloom (no readable {CONFIG} in it); name a run's folder (`fedloom runs` "
                        "lists them)")  # fmt: skip
    try:
        text = (path / CONFIG).read_text(encoding="utf-8")
        config = from_mapping(read_yaml(text, lambda node: keep_texts(Config, node)))
    except UserError as error:
        raise UserError(f"{path / CONFIG}: {error}") from None
    if path.name != (resolved := path.resolve()).name:  # a link, or '.'
        path = resolved
    where = dataclasses.replace(config.run, name=path.name, root=str(path.parent))
    return dataclasses.replace(config, run=where)


def read_summary(path: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json; empty if it cannot be read."""
    return read_object(path / SUMMARY)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it cannot be read."""
    try:
        content = read_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def busy(path: Path) -> bool:
    """Return whether a server now works on the run in a folder. Changes nothing, and needs no write permission."""
    try:
        handle = os.open(path / LOCK, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would block
    except OSError:
        return False
    try:
        portalocker.lock(handle, portalocker.LockFlags.SHARED | portalocker.LockFlags.NON_BLOCKING)
    except portalocker.AlreadyLocked:
        return True
    except (OSError, portalocker.LockException):  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def status(path: Path) -> str:
    """Return a run's status: running, finished, failed, interrupted, or stopped (it ended without writing a status)."""
    if busy(path):
        return RUNNING
    stated = read_summary(path).get("status")
    return stated if stated in ENDED else STOPPED


def waiting(path: Path) -> list[str]:
    """Return the ids of a run's requests that are not certified yet, oldest first; empty if the ledger cannot be read."""
    try:
        if not (path / LEDGER).is_file():
            return []
        uri = f"{(path / LEDGER).absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as ledger:
            rows = ledger.execute("SELECT id FROM requests WHERE state IN ('received', 'applied') ORDER BY rowid")
            known = [plain(str(id)) for (id,) in rows]
            with contextlib.suppress(OSError):  # another user's file
                known += _lost(path, ledger)
            return known
    except (OSError, sqlite3.Error, UnicodeDecodeError):
        return []


def _lost(path: Path, ledger: sqlite3.Connection) -> list[str]:
    """Return the ids of applied requests that a run lacks, because it was restored from an older copy."""
    (run,) = ledger.execute("SELECT run FROM runs").fetchone() or ("",)
    known = {id for (id,) in ledger.execute("SELECT id FROM requests")}
    members, found = {name for (name,) in ledger.execute("SELECT name FROM sites WHERE NOT forgotten")}, dict[str, None]()
    for _, entry in applied_to(path, run):
        with contextlib.suppress(KeyError, TypeError):  # a line that is not a request
            if entry["id"] not in known and members & set(entry["sites"]):
                found[plain(str(entry["id"]))] = None
    return list(found)


def applied_to(path: Path, run: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of the file with applied requests that are about a run: their numbers, and their other fields.

    Args:
        path: The run's folder.
        run: The run's id.
    """
    file = path.resolve().with_name(APPLIED)
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # an empty line, or one that a crash tore
            continue
        if isinstance(entry, dict) and (entry.pop("run", ""), entry.pop("folder", "")) == (run, path.resolve().name):
            yield number, entry


def holds(path: Path, config: Config) -> bool:
    """Return whether the folder has a run of this configuration. Location, trackers and newer keys do not count."""
    return is_run(path) and _same(read_config(path), config)


def _same_run(config: Config, path: Path) -> None:
    """Raise UserError unless the folder has a run of this configuration, with as many rounds or fewer."""
    there = read_config(path)
    if not _same(dataclasses.replace(there, rounds=config.rounds), config):
        raise UserError(f"{path}: was run with another configuration ({CONFIG}); it can only be resumed with that one")
    if config.rounds < there.rounds:
        raise UserError(f"rounds: got {config.rounds}, but {path} has {there.rounds} rounds; it can only get more")


def _same(one: Config, other: Config) -> bool:
    """Return whether both describe the same run, regardless of its location and trackers."""
    here, there = (dataclasses.replace(config, run=RunConfig(), tracking=[]) for config in (one, other))
    return here == there
