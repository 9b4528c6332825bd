"""What W&B has written of a run: its protobuf messages in LevelDB's log format. W&B has no reader in Python."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # bytes; a piece's header is its checksum (4), its length (2) and its kind
WHOLE, LAST = 1, 4  # kinds of pieces that end a message
MAGIC = b":W&B"


def messages(path: Path) -> Iterator[Any]:
    """The messages of a .wandb file up to where a killed process left off. ValueError if it is no such file."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    content, place, message = path.read_bytes(), HEADER, b""
    if content and not content.startswith(MAGIC):
        raise ValueError(f"{path}: is no file of W&B's, or of a later form")
    while place + HEADER <= len(content):
        if (left := BLOCK - place % BLOCK) < HEADER:
            place += left  # too little for a header: filled up
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        place += HEADER + length
        if place > len(content):
            return
        message += content[place - length : place]
        if kind in (WHOLE, LAST):
            try:
                yield Record.FromString(message)
            except DecodeError:
                return
            message = b""


def last_number(folder: Path, id: str, name: str) -> int:
    """The largest value of a number in the history of a run, over all files below W&B's folder; 0 if there is none."""
    found = [0]
    for path in folder.glob(f"*run-*-{id}/run-{id}.wandb"):
        for message in messages(path):
            found += [int(item.value_json) for item in message.history.item if [item.key, *item.nested_key][-1] == name]
    return max(found)
