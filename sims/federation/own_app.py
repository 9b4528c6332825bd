"""What a site runs of what a server sends: the ClientApp that is installed on its machine, and no other code."""

import importlib
from typing import Any

ANY, OWN = "any", "own"  # apps that a site runs


def run_own_app() -> None:
    """From now on this process does tasks with the installed ClientApp; nothing of the app that a server sends is unpacked.

    Flower's own program (1.41) unpacks and imports it.
    """
    from fedloom.clients.app import app

    place: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    place.install_from_fab = lambda *_, **__: None
    place.get_load_client_app_fn = lambda **_: lambda *__: app
