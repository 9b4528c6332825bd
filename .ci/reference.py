#!/usr/bin/env python3
"""Write reference pages of the API as HTML: what users import, subclass or read (pip install -e ".[dev]").

.ci/reference.py [FOLDER]    FOLDER: default reference/
"""

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pdoc

PAGES = (
    "conf", "fusion", "clients.data", "clients.networks", "clients.objectives", "clients.training", "server.strategies",
    "server.rounds", "server.ledger", "server.unlearning", "sims.operations", "sims.sweeps", "sims.comparison",
)  # fmt: skip


def documented(name: str) -> Iterator[str]:
    """Yield the module and those in it that pdoc does not add itself: where a package has an `__all__`, pdoc stops."""
    yield name
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        for inner in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
            yield from documented(inner.name)


def main() -> None:
    names = [
        "fedloom",
        "fedloom.sims.api",
        "fedloom.sims.result",
        *(name for page in PAGES for name in documented(f"fedloom.{page}")),
    ]
    for module in map(importlib.import_module, names):
        for name in getattr(module, "__all__", ()):
            setattr(module, name, getattr(module, name))  # some are imported at first use; pdoc reads those that exist
    warnings.filterwarnings("ignore", "The module specification")  # where a function has its module's name
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "reference")
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*names, output_directory=folder)
    print(f"{len(list(folder.rglob('*.html')))} pages: {folder}/index.html")


if __name__ == "__main__":
    main()
