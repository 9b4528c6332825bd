"""How much memory a Flower message takes that came as parts: the server asks before it reads one, a node before it takes it.

A part that is named several times counts as often. What is not the bytes of an array is read as JSON or as lists of small
things, and takes thirty times its bytes: of that a message has little.
"""

import importlib
import json
from collections.abc import Mapping
from typing import Any

from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of
from flwr.supercore.inflatable.inflatable_object import get_object_id

DIVIDER = b"\x00"  # between a part's head and its body
DATA = "ArrayChunk"  # the kind of parts whose bodies are taken as they are
MOST_RECORDS = 16 << 20  # bytes of all other parts of a message; names of 100,000 classes have 10 MB


class UnreadableError(ValueError):
    """A message that nobody will look at; the message says why."""


def check_unfolding(root: str, parts: Mapping[str, bytes], most: int) -> None:
    """UnreadableError for a message that takes more than `most` bytes, or much that is not arrays. `root`: its id.

    Raises what Flower raises for bytes that are not a part.
    """
    if sum(len(content) for content in parts.values() if head_of(content)[0] != DATA) > MOST_RECORDS:
        raise UnreadableError(f"it has more than {MOST_RECORDS >> 20} MiB beside the data of arrays")
    if _unfolded(root, parts, {}) > most:
        raise UnreadableError(f"it unfolds to more than {most >> 20} MiB")


def by_hash(root: str, parts: Mapping[str, bytes]) -> tuple[str, dict[str, bytes]]:
    """A message's id and its parts by their hashes, as they name each other: a SuperLink may keep them by other ids."""
    return get_object_id(parts[root]), {get_object_id(content): content for content in parts.values()}


def read_by_hash() -> None:
    """From now on Flower's own grid in this process reads messages so, too."""
    place: Any = importlib.import_module("flwr.superlink.grid.http_grid")
    read = place.inflate_object_from_contents
    place.inflate_object_from_contents = lambda root, parts: read(*by_hash(root, parts))


def _unfolded(id: str, parts: Mapping[str, bytes], known: dict[str, int]) -> int:
    """Bytes that a part takes in memory. `known`: of those seen."""
    if id not in known:
        kind, children, _ = head_of(parts[id])
        start = parts[id].index(DIVIDER) + 1
        named = children
        if kind == "Array":
            named = [children[place] for place in json.loads(parts[id][start:])["arraychunk_ids"]]
        elif kind in ("ArrayRecord", "RecordDict"):
            named = list(json.loads(parts[id][start:]).values())
        known[id] = len(parts[id]) - start + sum(_unfolded(child, parts, known) for child in named)
    return known[id]
