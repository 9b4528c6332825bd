"""Shorten keys and values, for the names of folders and for tables and plots."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_VALUE = 40  # letters of a value in a name
_ODD = re.compile(r"[^A-Za-z0-9.+_-]")


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return a short unique name for each dotted key: `training.rate` is rate, `strategy.name` is strategy."""
    dotted = list(keys)
    names = {key: key.removesuffix(".name").rpartition(".")[2] for key in dotted}
    twice = {name for name in names.values() if list(names.values()).count(name) > 1}
    return {key: key if name in twice else name for key, name in names.items()}


def text_of(value: Any) -> str:
    """Return a configuration value as one line of text. A section that has only a name is shown as that name."""
    if isinstance(value, Mapping) and [*value] == ["name"]:
        value = value["name"]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def part_of_name(value: Any) -> str:
    """Return a value as a part of a folder's name. If characters are dropped, a digest keeps the name unique."""
    text = text_of(value)
    plain = _ODD.sub("_", text)[:MAX_VALUE]
    return plain if plain == text else f"{plain}~{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def label_of(values: Mapping[str, Any], among: Iterable[str] = ()) -> str:
    """Return the label of a group of runs from its values, such as mode=exact, rate=0.01.

    `among`: the keys of all groups, if they have more; short names are unique among them.
    """
    short = short_keys(dict.fromkeys([*among, *values]))
    return ", ".join(f"{short[key]}={_cut(text_of(value))}" for key, value in values.items())


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"
