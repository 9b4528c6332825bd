"""Read the memory and core limits of a container or cluster job from Linux's control groups.

Version 2 has one tree of groups, version 1 has one for each resource. Limits of parent groups count, too.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class Limits:
    """Limits of a control group: all its `memory` and what is `free` (bytes), `cores` (can be a fraction). inf: no limit."""

    memory: float = float("inf")
    free: float = float("inf")
    cores: float = float("inf")


@dataclass(frozen=True)
class _Files:
    """The file names of a version."""

    limit: str
    used: str
    inactive: str  # of memory.stat: memory that the system can reclaim at once


TWO = _Files("memory.max", "memory.current", "inactive_file")
ONE = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def limits(root: Path = ROOT) -> Limits:
    """Return the memory and core limits of this process; infinite without control groups. `root`: the root folder."""
    result = Limits()
    for kind, mount, inside in _mounts(root):
        for folder in _groups(root, kind, mount, inside):
            result = Limits(
                min(result.memory, _number(folder / _files(kind).limit)),
                min(result.free, _free(folder, _files(kind))),
                min(result.cores, _cores(folder)),
            )
    return result


def _files(kind: str) -> _Files:
    return ONE if kind else TWO


def _mounts(root: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield each tree of groups: its resource (empty: all, version 2), its mount point, and the group mounted there."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        mount = root / fields[4].lstrip("/")
        if kinds[0] == "cgroup2":
            yield "", mount, fields[3]
        for resource in {"memory", "cpu"} & set(kinds[2].split(",")):
            yield resource, mount, fields[3]


def _groups(root: Path, kind: str, mount: Path, inside: str) -> Iterator[Path]:
    """Yield the visible folders of this process's group and its parents."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, resources, own = (*line.split(":", 2), "", "")[:3]
        if kind not in resources.split(","):
            continue
        below = own.removeprefix(inside) if inside != "/" else own
        parts = [part for part in below.split("/") if part]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _free(folder: Path, files: _Files) -> float:
    limit, used = _number(folder / files.limit), _number(folder / files.used)
    if limit == float("inf") or used == float("inf"):
        return float("inf")
    stat = dict(line.split(None, 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    back = float(stat.get(files.inactive, 0))
    return max(0.0, limit - max(0.0, used - back))


def _cores(folder: Path) -> float:
    """Return a group's quota in cores: its microseconds of all cores divided by the period."""
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):
        return float("inf")
    return int(quota) / int(period)


def _number(path: Path) -> float:
    text = _text(path).strip()
    return float(text) if text.isdigit() else float("inf")


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""
