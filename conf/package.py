"""The project's package: its name, its sub-packages, and a copy for other machines."""

import importlib.util
import shutil
from pathlib import Path

NAME = "fedloom"
ROOMS = ("conf", "fusion", "clients", "server", "sims")  # sub-packages; earlier versions installed them at the top level
ROOT = Path(__file__).parents[1]


def present_name(module: str) -> str:
    """Return the current full name of a module: server.ledger, from an earlier version, is now fedloom.server.ledger.

    A user's own package with such a name (server) has priority.
    """
    room, _, rest = module.partition(".")
    return f"{NAME}.{module}" if room in ROOMS and rest and not _is_users(room) else module


def copy_package(folder: Path) -> Path:
    """Copy the package into a folder, so that it can be imported from there. Return the copy's path."""
    copy = folder / NAME
    copy.mkdir()
    shutil.copy2(ROOT / "__init__.py", copy)
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def _is_users(package: str) -> bool:
    """Return whether a package of this name can be imported from outside this project's folder."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return any(Path(folder).resolve() != (ROOT / package).resolve() for folder in folders or ())
