"""What this machine has for Fedloom: versions, cores, memory, GPUs, disk, and where each domain would come from."""

import importlib
import os
import platform
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from conf.schema import DataConfig
from sims.tables import Table

Finding = tuple[str, str, bool]
PACKAGES = {  # what pip calls it, and what Python does
    "torch": "torch",
    "torchvision": "torchvision",
    "flwr": "flwr",
    "ray": "ray",
    "pot": "ot",
    "omegaconf": "omegaconf",
}
HINTS = {"ray": "; engine.name=inline works"}
GIB = 2**30


def doctor(data: DataConfig) -> list[Finding]:
    """(what, finding, ok) for everything a run needs. It never raises: what cannot be found out is a finding."""
    machine: dict[str, Callable[[], tuple[str, bool]]] = {
        "CPU cores": _cores,
        "memory": _memory,
        "GPUs": _gpus,
        "free disk": _disk,
    }
    return [
        ("fedloom", _fedloom(), True),
        ("python", platform.python_version(), True),
        *((package, *_package(package)) for package in PACKAGES),
        *((what, *_guarded(look)) for what, look in machine.items()),
        *_domains(data),
    ]


def doctor_table(findings: list[Finding]) -> Table:
    """The findings as a table."""
    rows = [[what, finding, "yes" if ok else "NO"] for what, finding, ok in findings]
    missing = sum(not ok for _, _, ok in findings)
    note = f"{missing} of {len(findings)} are not there: what needs them will not run." if missing else "All is there."
    return Table("Fedloom doctor", ["what", "finding", "ok"], rows, note)


def _fedloom() -> str:
    try:
        return metadata.version("fedloom")
    except metadata.PackageNotFoundError:
        return f"run from {Path(__file__).parents[1]}, not installed"


def _package(package: str) -> tuple[str, bool]:
    """The version of a package that can be imported."""
    try:
        module = importlib.import_module(PACKAGES[package])
    except ModuleNotFoundError as error:
        if error.name != PACKAGES[package]:
            return f"cannot be imported: {error}", False
        return f"not installed{HINTS.get(package, '')}", False
    except Exception as error:  # a broken package may raise anything, and this is the place to hear of it
        return f"cannot be imported: {error}{HINTS.get(package, '')}", False
    return str(getattr(module, "__version__", None) or metadata.version(package)), True


def _guarded(look: Callable[[], tuple[str, bool]]) -> tuple[str, bool]:
    try:
        return look()
    except Exception as error:  # a doctor goes on to the next question
        return f"cannot be found out: {error}", False


def _cores() -> tuple[str, bool]:
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    return f"{usable} usable of {os.cpu_count()}", True


def _memory() -> tuple[str, bool]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    bound = limit.read_text().strip() if limit.is_file() else "max"
    if bound.isdigit() and int(bound) < total:
        return f"{int(bound) / GIB:.1f} GiB (a limit on this container; the machine has {total / GIB:.1f} GiB)", True
    return f"{total / GIB:.1f} GiB", True


def _gpus() -> tuple[str, bool]:
    import torch

    names = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    return ", ".join(names) if names else "none; runs use the CPU", True


def _disk() -> tuple[str, bool]:
    free = shutil.disk_usage(Path.cwd()).free
    return f"{free / GIB:.1f} GiB in {Path.cwd()}", free > GIB


def _domains(data: DataConfig) -> list[Finding]:
    """Where each domain would come from. The data module is imported here: it needs packages that may be missing."""
    try:
        from clients.data import domain_names, where

        names = list(domain_names())
    except Exception as error:
        return [("domains", f"cannot be listed: {error}", False)]
    return [(f"domain {name}", *_guarded(lambda name=name: _domain(where(name, data)))) for name in names]


def _domain(line: str) -> tuple[str, bool]:
    return line, not line.startswith("not available")
