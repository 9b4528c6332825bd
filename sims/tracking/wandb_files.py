"""Read W&B's files of a run: protobuf messages in LevelDB's log format. W&B has no reader in Python."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # bytes; the header of a piece: checksum (4), length (2), kind (1)
WHOLE, LAST = 1, 4  # the kinds of pieces that end a message
MAGIC = b":W&B"


def messages(path: Path) -> Iterator[Any]:
    """Yield the complete messages of a .wandb file. Raise ValueError if it is not such a file."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    content, position, message = path.read_bytes(), HEADER, b""
    if content and not content.startswith(MAGIC):
        raise ValueError(f"{path}: not a W&B file, or one of a newer format")
    while position + HEADER <= len(content):
        if (left := BLOCK - position % BLOCK) < HEADER:
            position += left  # padding: no room for a header
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        position += HEADER + length
        if position > len(content):
            return
        message += content[position - length : position]
        if kind in (WHOLE, LAST):
            try:
                yield Record.FromString(message)
            except DecodeError:
                return
            message = b""


def last_number(folder: Path, id: str, name: str) -> int:
    """Return the largest value of `name` in the history of W&B run `id`, over its files in `folder`; 0 without any."""
    values = [0]
    for path in folder.glob(f"*run-*-{id}/run-{id}.wandb"):
        for message in messages(path):
            values += [int(item.value_json) for item in message.history.item if [item.key, *item.nested_key][-1] == name]
    return max(values)
