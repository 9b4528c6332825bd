"""What a node takes of its server: answers of bounded sizes, orders of a bounded size, and no app where it runs its own.

Flower's node (1.41) fetches all parts of an order, and unpacks the app's configuration, before any app of the site is asked.
"""

import importlib
from collections.abc import Callable
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from server.answers import be_wary
from sims.federation.bodies import LARGEST_PART, SMALL

MOST_ORDER = 10**9  # bytes, where the site's policy does not say
MOST_APP = 32 << 20  # bytes of an app's bundle; Flower's own limit is 10 MB
MOST_ANSWERS = {
    "/v1/fleet/pull-object": LARGEST_PART,
    "/v1/fleet/get-fab": MOST_APP,
    "/v1/fleet/pull-messages": 4 << 20,  # an order's head, and the ids of its parts
    "/v1/fleet/push-messages": 4 << 20,  # the ids of parts that are missing
    "/v1/fleet/get-run": 4 << 20,
}  # all others: SMALL
REFUSED = "RefusedError at order"  # as clients.guard tells what clients.policy refuses


class _TooLargeError(Exception):
    """An order has more bytes than this site takes."""


def bound_orders(largest: float, own: bool) -> None:
    """From now on the node of this process takes what it should. `largest`: MB of an order (0: MOST_ORDER)."""
    be_wary(lambda path: MOST_ANSWERS.get(path, SMALL))
    place: Any = importlib.import_module("flwr.supernode.start_client_internal")
    most = int(largest * 1.125e6) + (1 << 20) if largest else MOST_ORDER  # the policy measures it again, without heads
    place._pull_and_store_message = _bounded(place._pull_and_store_message, place._insert_message, most)
    if own:  # the installed app has no use for a configuration of the one that is sent
        place.get_fused_config_from_fab = lambda *_: {}


def _bounded(pull: Callable[..., int | None], insert: Callable[..., None], most: int) -> Callable[..., int | None]:
    """Flower's step that fetches an order, which answers it with an error beyond so many bytes."""

    def bounded(*, receive: Any, pull_object: Any, confirm_message_received: Any, **more: Any) -> int | None:
        came: list[Message] = []
        size = 0

        def remembered() -> Any:
            if (found := receive()) is not None:
                came.append(found[0])
            return found

        def counted(run: int, id: str) -> bytes:
            nonlocal size
            content = pull_object(run, id)
            size += len(content)
            if size > most:
                raise _TooLargeError(f"it has more than {most / 1e6:g} MB (site.yaml: largest_order)")
            return content

        steps = {"receive": remembered, "pull_object": counted, "confirm_message_received": confirm_message_received}
        run = pull(**more, **steps)
        if run is not None or size <= most:
            return run
        about = came[0].metadata
        insert(Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, REFUSED), reply_to=came[0]),
               more["state"], more["object_store"])  # fmt: skip
        confirm_message_received(about.run_id, about.message_id)
        return about.run_id

    return bounded
