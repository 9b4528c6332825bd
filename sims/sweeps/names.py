"""Short names of keys and values, for folders, tables and pictures."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

LONGEST = 40  # letters of a value in a name
_ODD = re.compile(r"[^A-Za-z0-9.+_-]")


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Dotted keys by what tells them apart in few letters: `training.rate` is rate, `strategy.name` is strategy."""
    dotted = list(keys)
    names = {key: key.removesuffix(".name").rpartition(".")[2] for key in dotted}
    twice = {name for name in names.values() if list(names.values()).count(name) > 1}
    return {key: key if name in twice else name for key, name in names.items()}


def text_of(value: Any) -> str:
    """A configuration's value as it is written there, in one line; a section with nothing but a name by that."""
    if isinstance(value, Mapping) and [*value] == ["name"]:
        value = value["name"]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def part_of_name(value: Any) -> str:
    """The value as part of a folder's name; what had to be left out is told apart by a digest."""
    text = text_of(value)
    plain = _ODD.sub("_", text)[:LONGEST]
    return plain if plain == text else f"{plain}~{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def label_of(values: Mapping[str, Any]) -> str:
    """What a group of runs has of its own: mode=exact, rate=0.01."""
    short = short_keys(values)
    return ", ".join(f"{short[key]}={_cut(text_of(value))}" for key, value in values.items())


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
