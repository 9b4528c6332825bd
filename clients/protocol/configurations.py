"""A cache of configurations by the sha256 of their JSON, in memory and, at a real site, on disk."""

import functools
from collections import OrderedDict
from pathlib import Path

from flwr.app import RecordDict

from fedloom.clients.protocol.failures import UnknownConfigurationError
from fedloom.clients.protocol.messages import TaskInstructions, config_digest, read_config_record
from fedloom.clients.storage.states import write_bytes
from fedloom.conf import Config, from_json
from fedloom.conf.errors import UserError

MAX_CACHED = 8  # configurations in memory
MOST_KEPT = 32  # configurations on a site's disk
MOST_BYTES = 64 * 2**20  # size of one configuration in a real federation

_TEXTS: OrderedDict[str, str] = OrderedDict()


@functools.lru_cache(maxsize=MAX_CACHED)
def parsed(text: str, run: str = "") -> Config:
    """Parse a configuration's JSON. Returns the same object for the same run: it carries caches of the run's data."""
    return from_json(text)


def configuration(order: TaskInstructions, content: RecordDict, store: Path | None) -> str:
    """Return the JSON of an order's configuration: from memory, the message `content`, or a site's folder `store` if any.

    Raises UnknownConfigurationError if none has it, and UserError for one that is invalid or has another digest.
    """
    digest = order.config
    if digest in _TEXTS:
        _TEXTS.move_to_end(digest)
        return _TEXTS[digest]
    path = store / "configurations" / f"{digest}.json" if store else None
    if (text := read_config_record(content, digest)) is not None:
        if store and len(text) > MOST_BYTES:
            raise UserError(f"order.config: has {len(text) / 1e6:.0f} MB, a site takes at most {MOST_BYTES / 1e6:.0f} MB")
        parsed(text, order.run)  # UserError for an invalid one, before it is stored
        if path is not None:
            write_bytes(path, text.encode(), private=True)
            _prune(path.parent)
    elif path is not None and path.is_file() and config_digest(stored := path.read_text(encoding="utf-8")) == digest:
        text = stored
    else:
        raise UnknownConfigurationError(digest)
    _TEXTS[digest] = text
    while len(_TEXTS) > MAX_CACHED:
        _TEXTS.popitem(last=False)
    return text


def _prune(folder: Path) -> None:
    """Delete the oldest configurations. The server sends a deleted one again when needed."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-MOST_KEPT]:
        file.unlink(missing_ok=True)
