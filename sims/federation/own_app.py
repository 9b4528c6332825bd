"""Run the installed ClientApp at a site, and no code that a server sends."""

import importlib
from typing import Any

ANY, OWN = "any", "own"  # which Apps a site runs


def run_own_app() -> None:
    """Make this process use the installed ClientApp. Flower (1.41) would unpack and import the app from the server."""
    from fedloom.sims.federation.node_app import app

    module: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    module.install_from_fab = lambda *_, **__: None
    module.get_load_client_app_fn = lambda **_: lambda *__: app
