"""Bound what a node accepts from its server: the size of answers and orders, and no app if it runs the installed one.

Flower's node (1.41) fetches all parts of an order, and unpacks the app's configuration, before the site's app can refuse it.
"""

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.run import Run

from fedloom.server.flower.http_answers import be_wary
from fedloom.server.flower.unfolding import check_unfolding
from fedloom.sims.federation.bodies import LARGEST_PART, SMALL

MOST_ORDER = 10**9  # bytes, if the site's policy sets no limit
MOST_APP = 32 << 20  # bytes of an app's bundle; Flower's limit is 10 MB
MOST_ANSWERS = {
    "/v1/fleet/pull-object": LARGEST_PART,
    "/v1/fleet/get-fab": MOST_APP,
    "/v1/fleet/pull-messages": 4 << 20,  # the head of an order, and the ids of its parts
    "/v1/fleet/push-messages": 4 << 20,  # the ids of missing parts
    "/v1/fleet/get-run": 4 << 20,
}  # other paths: SMALL
REFUSED = "RefusedError at order"  # the reason that clients.privacy.guard sends for a refused order


APP = Fab(hashlib.sha256(b"").hexdigest(), b"", {})  # replaces the server's app
NAME = "own/app"

Pull = Callable[..., int | None]  # Flower's step that fetches an order


class _TooLargeError(Exception):
    """An order has more bytes than this site accepts."""


def bound_orders(largest: float, own: bool) -> None:
    """Limit the bytes that the node of this process accepts from its server.

    `largest`: MB of the largest order; 0: MOST_ORDER. `own`: ignore the server's app.
    """
    be_wary(lambda path: MOST_ANSWERS.get(path, SMALL))
    module: Any = importlib.import_module("flwr.supernode.start_client_internal")
    most = int(largest * 1.125e6) + (1 << 20) if largest else MOST_ORDER  # the policy checks the exact size later
    pull = _bounded(module._pull_and_store_message, module._insert_message, most)
    module._pull_and_store_message = _without_apps(pull) if own else pull
    if own:  # the installed app does not need the configuration of the server's app
        module.get_fused_config_from_fab = lambda *_: {}


def _without_apps(pull: Pull) -> Pull:
    """Wrap `pull` to store no run's configuration or app, of which a server could name any number."""

    def wrapped(*, get_run: Any, get_fab: Any, **more: Any) -> int | None:
        def bare(run: int) -> Run:
            series = get_run(run).series_id
            return replace(Run.create_empty(run), fab_id=NAME, fab_hash=APP.hash_str, series_id=series)

        return pull(**more, get_run=bare, get_fab=lambda *_: APP)

    return wrapped


def _bounded(pull: Pull, insert: Callable[..., None], most: int) -> Pull:
    """Wrap `pull` to answer an order with an error if it has, or needs in memory, more than `most` bytes."""

    def bounded(*, receive: Any, pull_object: Any, confirm_message_received: Any, **more: Any) -> int | None:
        came: list[tuple[Message, ObjectTree]] = []
        size, refused = 0, False

        def remembered() -> Any:
            if (received := receive()) is not None:
                came.append(received)
            return received

        def counted(run: int, id: str) -> bytes:
            nonlocal size, refused
            content = pull_object(run, id)
            size += len(content)
            if size > most:
                refused = True
                raise _TooLargeError(f"it has more than {most / 1e6:g} MB (site.yaml: largest_order)")
            return content

        def checked(run: int, id: str) -> None:
            nonlocal refused
            refused = True
            check_unfolding(id, _parts(came[0][1], more["object_store"]), most)
            refused = False
            confirm_message_received(run, id)

        run = pull(**more, receive=remembered, pull_object=counted, confirm_message_received=checked)
        if not refused:
            return run
        message = came[0][0]
        insert(Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, REFUSED), reply_to=message),
               more["state"], more["object_store"])  # fmt: skip
        confirm_message_received(message.metadata.run_id, message.metadata.message_id)
        return message.metadata.run_id

    return bounded


def _parts(tree: ObjectTree, store: ObjectStore) -> dict[str, bytes]:
    """Return the parts of a received message."""
    return {part.object_id: store.get(part.object_id) or b"" for part in iterate_object_tree(tree)}
