"""The memory that a Flower message needs, computed from its parts before it is read.

The server checks this before it reads a message, and a node before it accepts one. A part that is named several times
counts as often. Data other than arrays is read as JSON or as lists of small objects, and needs thirty times its bytes. A
message needs little of it.
"""

import importlib
import json
from collections.abc import Mapping
from typing import Any

from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of
from flwr.supercore.inflatable.inflatable_object import get_object_id

DIVIDER = b"\x00"  # separates a part's head and body
DATA = "ArrayChunk"  # the type of parts that hold raw array data
MOST_RECORDS = 16 << 20  # bytes of all other parts of a message; the names of 100,000 classes need 10 MB


class UnreadableError(ValueError):
    """A message that is refused unread. The text gives the reason."""


def check_unfolding(root: str, parts: Mapping[str, bytes], most: int) -> None:
    """Refuse a message that needs too much memory.

    Args:
        root: The message's id.
        parts: The message's parts by id.
        most: The largest number of bytes.

    Raises:
        UnreadableError: The message needs more than `most` bytes, or has much data other than arrays. Flower raises its own
            errors for bytes that are not a part.
    """
    if sum(len(content) for content in parts.values() if head_of(content)[0] != DATA) > MOST_RECORDS:
        raise UnreadableError(f"it has more than {MOST_RECORDS >> 20} MiB in addition to the data of arrays")
    if _unfolded(root, parts, {}) > most:
        raise UnreadableError(f"it unfolds to more than {most >> 20} MiB")


def by_hash(root: str, parts: Mapping[str, bytes]) -> tuple[str, dict[str, bytes]]:
    """Return a message's id and parts, renamed to their hashes: parts refer to these, but a SuperLink may use other ids."""
    return get_object_id(parts[root]), {get_object_id(content): content for content in parts.values()}


def read_by_hash() -> None:
    """Make Flower's own grid in this process read messages through `by_hash`."""
    module: Any = importlib.import_module("flwr.superlink.grid.http_grid")
    read = module.inflate_object_from_contents
    module.inflate_object_from_contents = lambda root, parts: read(*by_hash(root, parts))


def _unfolded(id: str, parts: Mapping[str, bytes], known: dict[str, int]) -> int:
    """Return the bytes that a part needs in memory. `known` caches results."""
    if id not in known:
        kind, children, _ = head_of(parts[id])
        start = parts[id].index(DIVIDER) + 1
        named = children
        if kind == "Array":
            named = [children[index] for index in json.loads(parts[id][start:])["arraychunk_ids"]]
        elif kind in ("ArrayRecord", "RecordDict"):
            named = list(json.loads(parts[id][start:]).values())
        known[id] = len(parts[id]) - start + sum(_unfolded(child, parts, known) for child in named)
    return known[id]
