"""Prepare a process for a site's ClientApp: a limit for its memory, and no code that a server sends."""

import importlib
from typing import Any

from fedloom.conf.machine import limit_memory, memory

ANY, OWN = "any", "own"  # which Apps a site runs
MOST_MEMORY = 0.75  # share of the machine's memory: an order can ask for larger images and batches than fit


def be_client_app(apps: str) -> None:
    """Limit this process's memory and, unless `apps` is ANY, have it run the installed ClientApp."""
    limit_memory(MOST_MEMORY * memory())
    if apps == OWN:
        run_own_app()


def run_own_app() -> None:
    """Make this process use the installed ClientApp. Flower (1.41) would unpack and import the app from the server."""
    from fedloom.sims.federation.node_app import app

    module: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    module.install_from_fab = lambda *_, **__: None
    module.get_load_client_app_fn = lambda **_: lambda *__: app
