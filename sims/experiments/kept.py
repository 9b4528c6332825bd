"""Results on disk, so that nothing is measured twice."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.clients.storage.states import write_bytes


def kept(path: Path, key: Any, make: Callable[[], Any]) -> Any:
    """What `make` gives, as JSON at `path`; taken from there if it was made before, of the same `key` (anything of JSON)."""
    key = json.loads(json.dumps(key))
    result = _read(path)
    if result.get("key") != key:
        result = {"key": key, "value": make()}
        write_bytes(path, json.dumps(result).encode())
    return result["value"]


def _read(path: Path) -> dict[str, Any]:
    """What is in the file; nothing if it is not there or was cut off."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def fingerprint(key: Any, letters: int = 12) -> str:
    """What tells one key (anything of JSON) from others, in a file's name."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:letters]


def slug(name: str) -> str:
    """A name as part of a file's: small letters and digits, whatever else is between them a hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
