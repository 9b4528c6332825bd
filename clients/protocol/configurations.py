"""The configurations that a process knows, by the sha256 of their JSON. A site keeps the latest ones on its disk."""

import functools
from collections import OrderedDict
from pathlib import Path

from flwr.app import RecordDict

from fedloom.clients.protocol.failures import UnknownConfigurationError
from fedloom.clients.protocol.messages import config_digest, read_config_record
from fedloom.clients.storage.states import write_bytes
from fedloom.conf import Config, from_json
from fedloom.conf.errors import UserError

MOST = 8  # configurations that a process holds
MOST_KEPT = 32  # that a site keeps on its disk
MOST_BYTES = 64 * 2**20  # of one, in a real federation

_TEXTS: OrderedDict[str, str] = OrderedDict()


@functools.lru_cache(maxsize=MOST)
def parsed(text: str, run: str = "") -> Config:
    """The configuration that a text holds, the same object within a run: what depends on a run's data is kept with it."""
    return from_json(text)


def configuration(digest: str, content: RecordDict, store: Path | None) -> str:
    """The configuration's JSON: the one that the message brings, or one that came before.

    `store`: where the site keeps it (None: nowhere). Raises UnknownConfigurationError, and UserError for another one.
    """
    if digest in _TEXTS:
        _TEXTS.move_to_end(digest)
        return _TEXTS[digest]
    path = store / "configurations" / f"{digest}.json" if store else None
    if (text := read_config_record(content, digest)) is not None:
        if store and len(text) > MOST_BYTES:
            raise UserError(f"order.config: has {len(text) / 1e6:.0f} MB, and a site takes {MOST_BYTES / 1e6:.0f}")
        parsed(text)  # UserError for what is none: nothing of it is kept
        if path is not None:
            write_bytes(path, text.encode(), private=True)
            _prune(path.parent)
    elif path is not None and path.is_file() and config_digest(there := path.read_text(encoding="utf-8")) == digest:
        text = there
    else:
        raise UnknownConfigurationError(digest)
    _TEXTS[digest] = text
    while len(_TEXTS) > MOST:
        _TEXTS.popitem(last=False)
    return text


def _prune(folder: Path) -> None:
    """Delete the oldest configurations; a server sends one again if it is needed."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-MOST_KEPT]:
        file.unlink(missing_ok=True)
