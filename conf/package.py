"""This project's own package: its name, the packages in it, and a copy of it to take elsewhere."""

import importlib.util
import shutil
from pathlib import Path

NAME = "fedloom"
ROOMS = ("conf", "fusion", "clients", "server", "sims")  # its sub-packages, which earlier versions installed by these names
ROOT = Path(__file__).parents[1]


def present_name(module: str) -> str:
    """The name of a module now: server.ledger, as files of earlier versions have it, is fedloom.server.ledger.

    A package of the user's own that has such a name comes first.
    """
    room, _, rest = module.partition(".")
    return f"{NAME}.{module}" if room in ROOMS and rest and not _is_users(room) else module


def copy_package(folder: Path) -> Path:
    """A copy of the package in a folder, as it can be imported from there; where it is."""
    copy = folder / NAME
    copy.mkdir()
    shutil.copy2(ROOT / "__init__.py", copy)
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def _is_users(package: str) -> bool:
    """Whether a package of this name can be imported that is not in this project's folder."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return any(Path(place).resolve() != (ROOT / package).resolve() for place in places or ())
